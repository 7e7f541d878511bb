"""The costs of layers, compared with counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from axsparse.models.layer import Layer, Model
from axsparse.models.layer_cost import SAMPLES, Activations, Tracer
from axsparse.models.model_profile import FLOPS_PER_BYTE, costs_of, profile, with_costs

FP32, BF16 = torch.float32, torch.bfloat16


def run(module: nn.Module, *shape: int, dtype: torch.dtype = FP32) -> tuple[float, Activations]:
    return Tracer((torch.zeros(SAMPLES, *shape),), dtype).run("a", module)


CASES: dict[str, tuple[nn.Module, tuple[int, ...], torch.dtype, int, tuple[int, int]]] = {
    "linear": (nn.Linear(5, 7), (3, 5), FP32, 2 * 3 * 5 * 7, (3 * 5, 3 * 7)),
    "linear, half": (nn.Linear(5, 7), (3, 5), BF16, 2 * 3 * 5 * 7, (3 * 5, 3 * 7)),
    "convolution": (
        nn.Conv2d(3, 4, 3, padding=1, stride=2),
        (3, 8, 8),
        FP32,
        2 * (3 * 3 * 3) * 4 * (4 * 4),
        (3 * 8 * 8, 4 * 4 * 4),
    ),
}


@pytest.mark.parametrize(("module", "shape", "dtype", "flops", "sizes"), CASES.values(), ids=CASES)
def test_linear_layers_and_convolutions_keep_nothing_beside_their_inputs(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    flops: int,
    sizes: tuple[int, int],
) -> None:
    inputs, outputs = (dtype.itemsize * size for size in sizes)

    counted, activations = run(module, *shape, dtype=dtype)

    assert counted == flops
    assert activations == Activations(
        inputs=inputs,
        saved=0,
        outputs=outputs,
        widest=outputs,
        deferred=inputs + outputs,
        weight_flops=flops,
    )


def test_what_a_backward_needs_inside_a_layer_counts_once() -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            squared = x * x  # keeps x
            return squared * x  # keeps both

    _, activations = run(Cube(), 6)

    assert activations == Activations(24, 24, 24, widest=24)


def test_the_widest_is_the_largest_tensor_inside_or_at_the_end() -> None:
    bulging = nn.Sequential(nn.Linear(6, 50), nn.GELU(), nn.Linear(50, 7))

    _, inside = run(bulging, 6)
    _, end = run(nn.Linear(6, 30), 6)

    assert (inside.widest, end.widest) == (4 * 50, 4 * 30)


def test_every_layer_gets_what_the_one_before_gave() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, torch.zeros(x.shape[0], 5, dtype=torch.long, device=x.device)

    class Pick(nn.Module):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            return x.gather(1, number)

    tracer = Tracer((torch.zeros(SAMPLES, 6),), FP32)
    _, first = tracer.run("a", Pair())
    _, second = tracer.run("b", Pick())

    assert first.outputs == second.inputs == 4 * 6 + 8 * 5
    assert second.outputs == 4 * 5


class Attention(nn.Module):
    """Attention whose queries, keys and values lie side by side in the input."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        query, key, value = x.view(samples, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mask = self._settings.get("attn_mask")
        if mask is not None:
            mask = mask(torch.ones(length, length, dtype=x.dtype, device=x.device))
        mixed = F.scaled_dot_product_attention(
            query, key, value, **{**self._settings, "attn_mask": mask}
        )
        return mixed.transpose(1, 2).reshape(samples, length, -1)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "whole": {"scale": 0.5},
    "masked": {"attn_mask": lambda ones: ones.tril().bool()},
    "biased": {"attn_mask": lambda ones: ones.tril()},
    "dropping": {"is_causal": True, "dropout_p": 0.1},
}


@pytest.mark.parametrize(
    ("settings", "dtype"), [*zip(ATTENTIONS.values(), [FP32, BF16] * 3, strict=False)]
)
def test_attention_keeps_what_it_keeps_on_a_cpu(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    length, width = 64, 16
    attention = Attention(**settings)
    inputs = torch.randn(SAMPLES, length, 3 * 4 * width, dtype=dtype, requires_grad=True)
    kept: dict[int, Tensor] = {}
    with saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.untyped_storage().data_ptr(), tensor),
        lambda tensor: tensor,
    ):
        attention(inputs)
    own = inputs.untyped_storage().data_ptr()

    flops, found = run(attention, length, 3 * 4 * width, dtype=dtype)

    real = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at != own)
    assert found.saved == real // SAMPLES
    scores = 4 * length**2 * dtype.itemsize
    assert (found.saved > scores) == ("dropout_p" in settings)
    assert flops == 4 * 4 * length**2 * width


def model(*, example: bool, flops: float | None = None) -> Model:
    layers = [
        Layer("a", lambda: nn.Linear(6, 6), flops=flops),
        Layer("b", lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh())),
    ]
    return Model(
        layers,
        loss=lambda output, target: output.sum(),
        example=(lambda samples: (torch.zeros(samples, 6),)) if example else None,
    )


def test_a_survey_with_an_example_weighs_flops_and_bytes() -> None:
    first, second = profile(model(example=True), BF16).layers

    assert (first.flops, second.flops) == (72, 96)
    assert first.work == 72 + FLOPS_PER_BYTE * 12
    assert second.work == 96 + FLOPS_PER_BYTE * (16 + 16)


def test_without_an_example_parameters_count_unless_flops_are_given() -> None:
    found = profile(model(example=False, flops=7))

    assert [layer.work for layer in found.layers] == [7, 2 * 56]
    assert found.flops == 7 + 2 * 56
    assert found.layers[0].activations is None


@pytest.mark.parametrize("example", [True, False])
def test_costs_reach_ranks_that_have_not_run_the_layers(example: bool) -> None:
    found = profile(model(example=example), BF16)

    assert with_costs(profile(model(example=False)), costs_of(found)) == found
