"""The allocations of a step on top of the state, the temporaries of one block whatever the tensor,
and the peak of building a stage."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast

import pytest
import torch
from support.allocated import peak_of_numpy, peak_of_torch
from support.runs import random_init
from torch import nn

from axsparse.models.layer import Layer
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import ScoredMasks
from axsparse.pruning.targets import kept_entries
from axsparse.samo.host import host_step
from axsparse.samo.index import base
from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim import update as update_module
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Hyper, Optimizer
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.optim.update import norm_partials, update
from axsparse.samo.precision import DTYPES
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import IndexKind, StateFormat
from axsparse.samo.tensor_state import TensorState

HYPER = Hyper(step=1, learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
KEPT = 14 * BLOCK
CHUNK = 16 * BLOCK
"""Bytes of one block in work: four fp32 values an entry, such as gradient, master and
denominator, and what is just being made of them."""
POSITIONS = 12 * BLOCK
"""Bytes of a block's positions where numpy decodes them."""
NUMBERS = 8192
"""Bytes of sums, of other single numbers and of the arguments of a loop."""
OPTIMIZERS = {"adamw": ADAMW, "lamb": LAMB, "nesterov": sgd(0.9, nesterov=True)}


def trained_layer(index: Index, numel: int, master: str, optimizer: Optimizer) -> LayerState:
    """A layer of one tensor, after a step that has compiled and allocated what stays."""
    dtype = DTYPES[master]
    tensor = TensorState("w", nn.Parameter(torch.zeros(numel, dtype=dtype)), index, decays=True)
    layer = LayerState("layer", [tensor], StateFormat(dtype, dtype, optimizer.moments))
    layer.accumulate(tensor, torch.ones(numel, dtype=dtype))
    update([layer], optimizer, HYPER, 0.5)
    return layer


def half_kept(kind: str) -> Index:
    mask = torch.zeros(2 * KEPT, dtype=torch.bool)
    mask[::2] = True
    return make_index(mask, cast("IndexKind", kind))


@pytest.mark.parametrize(
    ("kind", "master", "name", "compiles"),
    [
        ("int32", "bf16", "adamw", True),
        *(("mask", master, "adamw", True) for master in DTYPES),
        ("mask", "bf16", "adamw", False),
        *(("full", "fp32", name, False) for name in OPTIMIZERS),
    ],
)
def test_an_update_allocates_one_chunk(
    kind: str, master: str, name: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiles:
        monkeypatch.setattr(update_module, "can_compile", lambda: False)
    index, numel = (FullIndex(KEPT), KEPT) if kind == "full" else (half_kept(kind), 2 * KEPT)
    optimizer = OPTIMIZERS[name]
    layer = trained_layer(index, numel, master, optimizer)

    peak = peak_of_torch(lambda: update([layer], optimizer, HYPER, 0.5))

    assert BLOCK <= peak <= CHUNK + NUMBERS < KEPT * 2


def test_an_update_without_a_compiler_needs_a_chunks_positions_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "can_compile", lambda: False)
    layer = trained_layer(half_kept("mask"), 2 * KEPT, "bf16", ADAMW)

    def step() -> None:
        update([layer], ADAMW, HYPER, 0.5)

    assert peak_of_torch(step) <= CHUNK + NUMBERS
    assert BLOCK <= peak_of_numpy(step) <= POSITIONS + NUMBERS < KEPT * 2


@pytest.mark.parametrize(("name", "master"), [("adamw", "fp32"), ("nesterov", "bf16")])
def test_loops_over_what_is_not_pruned_allocate_nothing(name: str, master: str) -> None:
    layer = trained_layer(FullIndex(KEPT), KEPT, master, OPTIMIZERS[name])

    peak = peak_of_torch(lambda: update([layer], OPTIMIZERS[name], HYPER, 0.5))

    assert peak <= NUMBERS


def test_the_norm_allocates_nothing_with_a_loop_and_one_chunk_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = trained_layer(half_kept("mask"), 2 * KEPT, "bf16", ADAMW)

    def norm() -> None:
        norm_partials([layer], ["w"])

    norm()  # compiles the loop
    assert max(peak_of_torch(norm), peak_of_numpy(norm)) <= NUMBERS
    monkeypatch.setattr(host_step, "can_compile", lambda: False)
    assert BLOCK <= peak_of_torch(norm) <= CHUNK + NUMBERS < KEPT * 2


# -- building a stage -----------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "index"), [("magnitude", "int32"), ("random", "mask")])
def test_building_peaks_at_most_the_largest_parameter_in_fp32_above_what_it_leaves(
    score: Literal["magnitude", "random"], index: IndexKind
) -> None:
    width = 1280
    shapes = {"a": (width, width), "b": (width, 2 * width), "c": (4 * width, width)}
    layers = [
        Layer(name, partial(nn.Linear, *shape, bias=False), init=random_init)
        for name, shape in shapes.items()
    ]
    kept = {f"{name}.weight": kept_entries(a * b, 0.95) for name, (a, b) in shapes.items()}
    types = StateFormat(torch.bfloat16, torch.bfloat16, ADAMW.moments, index)
    options = StateOptions(types, 1, ScoredMasks(Criterion(score), kept))
    built: list[BuiltLayer] = []

    peak = peak_of_torch(lambda: built.extend(build_layers(layers, {}, options)))

    above = peak - sum(layer.state.live_bytes().total for layer in built)
    assert 0 < above <= 16 * width**2
