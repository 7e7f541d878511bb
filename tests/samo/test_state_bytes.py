"""Live bytes, three ways: of the state's tensors, by the formula, and in the entire process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.runs import kept, random_init, tiny_config, tiny_gpt, token_data, train_in_process
from torch import nn

from axsparse.config.model_config import GptConfig
from axsparse.config.schema import PruningConfig
from axsparse.models.layer import Layer, Model, Tie
from axsparse.models.model_profile import profile
from axsparse.models.zoo.gpt import gpt
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import ScoredMasks
from axsparse.samo.expansion import Expansion
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.state_bytes import IndexKind, StateBytes, StateFormat, WeightKind, stage_bytes


@dataclass(frozen=True)
class Case:
    """A stage to be built: which layers of which model, and how."""

    model: str
    pruning: PruningConfig | None
    dtype: torch.dtype = torch.bfloat16
    gradient_dtype: torch.dtype = torch.bfloat16
    index: IndexKind = "int32"
    weights: WeightKind = "dense"
    layers: slice = field(default_factory=lambda: slice(None))


FULL = (torch.float32, torch.float32)
BLOCKS = PruningConfig(sparsity=0.9)
ALL = PruningConfig(method="random", sparsity=0.9, include="all")
BARELY = PruningConfig(sparsity=0.004, include="all")
"""Removes nothing of small matrices, whose entries times 0.004 round to zero."""

CASES = {
    "tied GPT": Case("tied", BLOCKS),
    "tied GPT, embeddings too": Case("tied", ALL),
    "tied GPT, fp32 sums": Case("tied", ALL, gradient_dtype=torch.float32),
    "tied GPT, fp32": Case("tied", ALL, *FULL),
    "tied GPT, dense": Case("tied", None),
    "tied GPT, auto": Case("tied", ALL, index="auto"),
    "tied GPT, mask": Case("tied", ALL, index="mask"),
    "tied GPT, sparse weights": Case("tied", ALL, weights="sparse"),
    "tied GPT, sparse weights, fp32": Case("tied", ALL, *FULL, weights="sparse"),
    "untied GPT, sparse weights": Case("untied", BLOCKS, index="auto", weights="sparse"),
    "first half of a tied GPT": Case("tied", ALL, layers=slice(0, 2)),
    "second half of a tied GPT": Case("tied", ALL, layers=slice(2, None)),
    "GPT, two separate weights": Case("untied", BLOCKS, index="auto"),
    "frozen parameters, fp32": Case("frozen", BLOCKS, *FULL),
    "tied frozen parameters": Case("tied and frozen", ALL),
    "tied within one layer, sparse weights": Case("tied within", ALL, weights="sparse"),
    "layers that initialise themselves, sparse weights": Case(
        "by itself", BLOCKS, weights="sparse"
    ),
    "pruning that removes nothing, sparse weights": Case("tiny matrices", BARELY, weights="sparse"),
    "running statistics, fp32": Case("norm", None, *FULL),
    "pruning that keeps nothing": Case("tiny matrices", BLOCKS),
}


class Pair(nn.Module):
    """Two weights, of which some may be frozen."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(12, 10, bias=False)
        self.two = nn.Linear(12, 10)
        self.two.weight.requires_grad_(not frozen)


def layers_of(*builds: Callable[[], nn.Module]) -> list[Layer]:
    return [Layer(name, build, init=random_init) for name, build in zip("ab", builds, strict=False)]


FROZEN = partial(Pair, frozen=True)
MODELS: dict[str, tuple[list[Layer], list[Tie]]] = {
    "frozen": (layers_of(FROZEN), []),
    "tied and frozen": (layers_of(FROZEN, FROZEN), [Tie("a.two.weight", "b.two.weight")]),
    "tied within": (layers_of(Pair), [Tie("a.one.weight", "a.two.weight")]),
    "by itself": ([Layer("a", Pair), Layer("norm", partial(nn.LayerNorm, 10))], []),
    "norm": (layers_of(partial(nn.BatchNorm1d, 16)), []),
    "tiny matrices": (layers_of(partial(nn.Linear, 2, 2)), []),
}


def make_model(name: str) -> Model:
    if name in MODELS:
        layers, ties = MODELS[name]
        return Model(layers, loss=lambda output, target: output.sum(), ties=ties)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 50}
    return gpt(GptConfig(**sizes, sequence_length=12, tie_embeddings=name == "tied"), 12)


def case_masks(model: Model, pruning: PruningConfig) -> ScoredMasks:
    assert pruning.method == "magnitude" or pruning.method == "random"
    return ScoredMasks(Criterion(pruning.method, 1), kept(model, pruning))


def build(case: Case, expansion: Expansion | None = None) -> list[BuiltLayer]:
    model = make_model(case.model)
    options = StateOptions(
        StateFormat(case.dtype, case.gradient_dtype, ADAMW.moments, case.index),
        seed=1,
        masks=None if case.pruning is None else case_masks(model, case.pruning),
        expansion=expansion,
    )
    ties = {tie.second: tie.first for tie in model.ties}
    return build_layers(model.layers[case.layers], ties, options)


def predicted(case: Case) -> StateBytes:
    profiled = profile(make_model(case.model))
    return stage_bytes(
        profiled.layers[case.layers],
        profiled.ties,
        {} if case.pruning is None else kept(make_model(case.model), case.pruning),
        StateFormat(
            case.dtype, case.gradient_dtype, ADAMW.moments, case.index, weights=case.weights
        ),
    )


def process_bytes() -> int:
    """Bytes of all tensor storages that this process holds, each once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.fixture(scope="module")
def frozen_past() -> Iterator[None]:
    """Objects that imports and other tests left behind are not looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_past")
@pytest.mark.parametrize("name", CASES)
def test_state_formula_and_process_agree_to_the_byte(name: str) -> None:
    before = process_bytes()
    case, expansion = CASES[name], None
    if case.weights == "sparse":
        expansion = Expansion(case.dtype, torch.device("cpu"))

    layers = build(case, expansion)

    state = sum((layer.state.live_bytes() for layer in layers), StateBytes())
    if expansion is not None:
        state += StateBytes(expanded=expansion.nbytes)
    assert state == predicted(case)
    assert process_bytes() - before == state.total


@pytest.mark.parametrize(
    ("precision", "at_step", "g_inter", "g_data", "samo"),
    [
        ("bf16", 1, 2, 1, {}),
        ("fp32", 0, 1, 2, {}),
        ("bf16", 0, 1, 1, {}),
        ("bf16", 1, 1, 2, {"gradient": "exact"}),
        ("bf16", 1, 2, 1, {"weights": "sparse"}),
        ("fp32", 0, 1, 2, {"weights": "sparse"}),
        ("bf16", 0, 1, 2, {"weights": "sparse", "zero_stage": 1}),
        ("bf16", 0, 1, 2, {"weights": "sparse", "zero_stage": 3}),
        ("bf16", 1, 2, 2, {"weights": "sparse", "zero_stage": 3}),
        ("fp32", 0, 1, 3, {"weights": "sparse", "zero_stage": 3}),
    ],
)
def test_after_training_every_rank_holds_what_the_formula_says(
    precision: str, at_step: int, g_inter: int, g_data: int, samo: dict[str, Any]
) -> None:
    config = tiny_config(
        precision=precision,
        pruning={"sparsity": 0.9, "include": "all", "at_step": at_step},
        samo=samo,
        train={"steps": 2},
    )
    model = tiny_gpt(config)
    profiled = profile(model)

    for trainer, _ in train_in_process(g_inter, g_data, model, config, token_data()):
        names = {layer.spec.name for layer in trainer.layers}
        layers = [layer for layer in profiled.layers if layer.name in names]
        gradient = trainer.layers[0].state.accumulator.dtype
        shares = config.samo.zero_stage != 0
        stored = StateFormat(
            torch.bfloat16 if precision == "bf16" else torch.float32,
            gradient,
            ADAMW.moments,
            "auto",
            replicas=g_data if shares else 1,
            weights=trainer.plan.state_format.weights,
            gathers=config.samo.zero_stage == 3,
        )
        replica = trainer.coords.replica
        expected = stage_bytes(layers, profiled.ties, kept(model, config.pruning), stored, replica)
        assert trainer.state_bytes() == expected
