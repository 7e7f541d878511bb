"""Runs with sparse products: the same bits in every layout, near the results of dense products."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.cases import ONE_STAGE, PlannedModel, Row, batch, judge, merged, reference
from support.runs import (
    around_step,
    random_init,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model
from axsparse.samo import gradient_hooks
from axsparse.samo.host.compiled_loops import has_bf16_loops
from axsparse.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not has_bf16_loops(), reason="numba or AVX-512 BF16 is missing")
WIDTHS = (200, 232, 180, 208, 190)
TOKENS, MICROBATCHES = 150, 4
MATRICES = len(WIDTHS) - 1
SAMPLED, OUTPUTS, INPUTS = "sampled_product", "sparse_linear", "sparse_input_gradient"


def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return random_init(name, shape, generator) / 8


def hidden(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


def model() -> Model:
    layers = [
        Layer(f"hidden{number}", partial(hidden, inputs, outputs), init=init)
        for number, (inputs, outputs) in enumerate(pairwise(WIDTHS))
    ]
    head = Layer("out", lambda: nn.Linear(WIDTHS[-1], 5), kind="head", init=init)
    return Model([*layers, head], loss=summed_loss, name="mlp")


def data() -> ArrayDataset:
    return vector_data(3 * TOKENS * MICROBATCHES, WIDTHS[0])


MLP = PlannedModel(
    "mlp",
    lambda _: model(),
    data,
    settings={
        **batch(MICROBATCHES * TOKENS, TOKENS),
        "precision": "bf16",
        "pruning": {"sparsity": 0.9},
        "train": {"steps": 4, "check_layers": False},  # whose products would be counted
    },
)
GPT = PlannedModel(
    "gpt",
    tiny_gpt,
    lambda: token_data(samples=12, length=64),
    settings={
        **batch(4, 2),
        "model": {"hidden_size": 192, "sequence_length": 64, "vocab_size": 256},
        "precision": "bf16",
        "pruning": {"sparsity": 0.9, "include": "all"},
        "train": {"steps": 3},
    },
)


def config(**sections: Any) -> Config:
    return tiny_config(**merged(MLP.settings, sections))


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many sampled products, outputs and gradients of inputs were computed from kept
    entries."""
    found = Counter[str]()

    def count(name: str) -> None:
        inner = getattr(gradient_hooks, name)

        def counted(*given: Any) -> Tensor:
            found[name] += 1
            return torch.as_tensor(inner(*given))

        monkeypatch.setattr(gradient_hooks, name, counted)

    for name in (SAMPLED, OUTPUTS, INPUTS):
        count(name)
    return found


RECOMPUTED = {"pipeline": {"checkpoint_activations": 2}}
LAYOUTS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((2, 1), {}),
    ((4, 1), {"pipeline": {"extra_in_flight": 2}}),
    ((2, 1), {"pipeline": {"schedule": "1f1b"}}),
    ((1, 1), RECOMPUTED),
    ((1, 1), {"pipeline": {"split_backward": True}}),
    ((2, 1), {"pipeline": {"split_backward": True, "extra_in_flight": 2}}),
    ((1, 1), {"samo": {"index": "mask"}}),
]


@pytest.mark.parametrize(("layout", "free"), LAYOUTS, ids=str)
def test_every_layout_has_the_same_bits(
    layout: tuple[int, int], free: dict[str, Any], calls: Counter[str]
) -> None:
    row = Row(layout, free=free, judge=ONE_STAGE, subject=MLP)
    reference(row)
    calls.clear()

    judge(row)

    again = 4 * MICROBATCHES * 2 if free is RECOMPUTED else 0
    assert calls == {
        SAMPLED: 4 * MICROBATCHES * MATRICES,
        OUTPUTS: 4 * MICROBATCHES * MATRICES + again,
        INPUTS: 4 * MICROBATCHES * (MATRICES - 1),
    }


@pytest.mark.parametrize("gradient", ["half", "fp32"])
def test_sparse_products_train_as_dense_ones(gradient: str, calls: Counter[str]) -> None:
    samo = {"gradient": gradient}
    whole = config(samo={**samo, "sparse_products": False})
    [(_, expected)] = train_in_process(1, 1, model(), whole, data())
    assert not calls

    [(_, trace)] = train_in_process(1, 1, model(), config(samo=samo), data())

    assert calls[SAMPLED] == 4 * MICROBATCHES * MATRICES
    # Both round a sum to 8 bits, seldom to different neighbours; AdamW then moves a weight whose
    # gradient is near zero the other way.
    assert trace.losses == pytest.approx(expected.losses, rel=1e-3)
    assert trace.norms == pytest.approx(expected.norms, rel=1e-2)
    for name, master in trace.masters.items():
        apart = (master - expected.masters[name]).abs()
        assert apart.mean() < 0.02 * expected.masters[name].abs().mean(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_has_the_same_bits_in_every_layout(tied: bool, calls: Counter[str]) -> None:
    """With embeddings and head pruned, by whose weight the loss multiplies."""
    for free in ({"checkpoint_activations": 1}, {"split_backward": True, "extra_in_flight": 1}):
        settings = {"model": {"tie_embeddings": tied}}
        judge(Row((2, 1), settings, {"pipeline": free}, ONE_STAGE, GPT))

    assert calls[SAMPLED]


def test_products_are_sparse_from_the_step_on_that_has_pruned_enough(calls: Counter[str]) -> None:
    gradual = {"method": "gradual", "at_step": 1, "interval": 1, "until_step": 4}
    settings = config(pruning=gradual, train={"steps": 6})
    kept: list[float] = []

    def before(trainer: Trainer) -> None:
        tensor = trainer.layers[0].state.tensors[0]
        kept.append(tensor.kept / tensor.parameter.numel())
        calls.clear()

    def after(*_: object) -> None:
        assert (calls[SAMPLED] > 0) == (kept[-1] <= 0.2)
        assert (calls[OUTPUTS] > 0) == (kept[-1] <= 0.3)

    train_in_process(1, 1, model(), settings, data(), before=around_step(before, after))

    assert kept[0] == 1
    assert sorted(kept, reverse=True) == kept
    assert kept[-1] == pytest.approx(0.1, abs=0.01)
