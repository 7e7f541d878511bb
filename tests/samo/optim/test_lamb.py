"""LAMB over kept entries, against the paper's algorithm on masked dense tensors."""

from __future__ import annotations

import pytest
import torch
from support.oracle import DenseLamb
from torch import Tensor, nn

from axsparse.samo.index.base import FullIndex, make_index
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import StateFormat
from axsparse.samo.tensor_state import TensorState

RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-6, 0.1
NUMEL = {"small": 1000, "two blocks": 2 * BLOCK, "three blocks": 3 * BLOCK + 17, "bias": 70}
TOLERANCE = 1e-5
"""The dense run is fp64; a step of ours rounds to fp32 some ten times, by 6e-8 each."""


def random(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def masks() -> dict[str, Tensor]:
    """Half of each tensor, so that the larger ones keep one block and more than one."""
    kept = {name: random(len(name), numel) > 0 for name, numel in NUMEL.items()}
    return kept | {"bias": torch.ones(NUMEL["bias"], dtype=torch.bool)}


def layer_of(kept: dict[str, Tensor], *, half: bool, scale: float = 1.0) -> LayerState:
    """Tensors of different sizes of entries, too, on which the ratio depends."""
    dtype = torch.bfloat16 if half else torch.float32
    tensors = [
        TensorState(
            name,
            nn.Parameter(torch.zeros(mask.numel(), dtype=dtype)),
            FullIndex(mask.numel()) if bool(mask.all()) else make_index(mask),
            decays=name != "bias",
        )
        for name, mask in kept.items()
    ]
    layer = LayerState("layer", tensors, StateFormat(dtype, dtype, LAMB.moments))
    for number, tensor in enumerate(tensors):
        layer.optimizer_state.write_master(
            tensor, 0, start_of(number, kept[tensor.name], scale)[kept[tensor.name]]
        )
    return layer


def start_of(number: int, mask: Tensor, scale: float = 1.0) -> Tensor:
    return random(number, mask.numel()) * mask * scale * 10.0**-number


def gradient_of(number: int, step: int, numel: int) -> Tensor:
    return random(100 * step + number, numel) * (number + 1)


def train(layer: LayerState, steps: int) -> None:
    for step in range(1, steps + 1):
        for number, tensor in enumerate(layer.owned):
            tensor.accumulated = False
            layer.accumulate(tensor, gradient_of(number, step, tensor.weight_D.numel()))
        update([layer], LAMB, Hyper(step, RATE, BETAS, EPS, DECAY), 0.5)


def dense_run(kept: dict[str, Tensor], steps: int, *, half: bool) -> dict[str, Tensor]:
    dense = {n: nn.Parameter(start_of(i, mask)) for i, (n, mask) in enumerate(kept.items())}
    groups = [
        {"params": [x], "weight_decay": 0.0 if name == "bias" else DECAY}
        for name, x in dense.items()
    ]
    optimizer = DenseLamb(groups, RATE, BETAS, EPS)
    for step in range(1, steps + 1):
        for number, (name, x) in enumerate(dense.items()):
            gradient = gradient_of(number, step, x.numel())
            x.grad = (gradient.bfloat16().float() if half else gradient) * kept[name] * 0.5
        optimizer.step()
    return {name: x.detach() for name, x in dense.items()}


@pytest.mark.parametrize("half", [False, True])
def test_kept_entries_follow_the_papers_algorithm_on_masked_dense_tensors(half: bool) -> None:
    kept = masks()
    layer = layer_of(kept, half=half)
    expected = dense_run(kept, 4, half=half)

    train(layer, 4)

    for name, mask in kept.items():
        scale = float(expected[name].abs().max())
        error = (layer.master(name) - expected[name][mask]).abs().max()
        assert float(error) <= TOLERANCE * scale, name
        weight = layer.by_full_name[name].weight_D
        assert not weight[~mask].any()


def test_a_step_of_length_zero_moves_nothing() -> None:
    layer = layer_of({"bias": torch.ones(50, dtype=torch.bool)}, half=False)
    before = layer.master("bias").clone()

    update([layer], LAMB, Hyper(1, RATE, BETAS, EPS, DECAY), 0.5)

    assert torch.equal(layer.master("bias"), before)


def test_a_tensor_of_zeros_moves_by_the_step_itself() -> None:
    layer = layer_of({"w": torch.ones(50, dtype=torch.bool)}, half=False, scale=0.0)

    train(layer, 1)

    # The first bias-corrected step of an entry is the sign of its gradient.
    expected = -RATE * gradient_of(0, 1, 50).sign()
    torch.testing.assert_close(layer.master("w"), expected, rtol=1e-3, atol=0)
