"""The step by compiled loops, bit by bit against the functions of torch operations."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
from support.exhaustive import by_default, each_once
from support.kernel_contract import (
    STATES,
    Types,
    layer_of,
    mask_for,
    random_mask,
    randoms,
    same_bits,
    state_of,
)

from axsparse.runtime.communication import Collective
from axsparse.samo.host import host_step
from axsparse.samo.host.compiled_loops import FEW, can_compile
from axsparse.samo.host.host_step import CHUNK, sum_of_squares
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim import update as update_module
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper, Optimizer
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.optim.update import update
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK, Replicas
from axsparse.samo.state_bytes import Encoding, StateFormat

pytestmark = pytest.mark.skipif(not can_compile(), reason="needs numba")

NESTEROV, MOMENTUM = sgd(0.9, nesterov=True), sgd(0.9, nesterov=False)
PLAIN = sgd(0.0, nesterov=False)
HYPER = Hyper(1, 1e-2, (0.9, 0.95), 1e-8, 0.1)
FULL_NAN = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
"""A NaN that rounding up as if it were a number would turn into a zero."""
SPECIAL = torch.tensor(
    [float("nan"), math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-42, 3.3895e38]
)


def stepped(layer: LayerState, optimizer: Optimizer, hyper: Hyper, *, loop: bool) -> None:
    """One step, by the loop or by the functions, whatever the sizes."""
    with (
        mock.patch.object(host_step, "step", wraps=host_step.step) as runs,
        mock.patch.object(update_module, "FEW", -1 if loop else 1 << 62),
    ):
        update([layer], optimizer, hyper, 0.3)
    assert bool(runs.call_count) is loop


def same_layers(ours: LayerState, theirs: LayerState) -> None:
    for tensor, like in zip(ours.tensors, theirs.tensors, strict=True):
        same_bits(tensor.weight_D, like.weight_D)
    mine, yours = (each.optimizer_state.stored().tensors for each in (ours, theirs))
    for own, other in zip(mine, yours, strict=True):
        same_bits(own, other)


@pytest.mark.parametrize(
    ("optimizer", "state", "kind", "numel"),
    each_once(
        (ADAMW, NESTEROV, MOMENTUM, PLAIN),
        STATES,
        ("mask", None, "int32"),
        (3 * CHUNK + 1003, CHUNK + 1, 17),
    ),
)
def test_a_loop_leaves_the_bits_of_torch(
    optimizer: Optimizer, state: Types, kind: Encoding | None, numel: int
) -> None:
    """In every type, encoding and size, over steps."""
    values, mask = randoms(numel, 4).mul_(3), mask_for(kind or "full", numel, 0.3)
    layers = []
    for _ in range(2):
        layer, tensor = layer_of(mask, *state, len(optimizer.moments), kind)
        layer.optimizer_state.write_master(tensor, 0, values[: tensor.kept].clone())
        layers.append(layer)

    # A mean that moves more than half way is interpolated from its other end.
    for step, beta1 in ((1, 0.9), (2, 0.4)):
        hyper = replace(HYPER, step=step, betas=(beta1, 0.95))
        for layer, loop in zip(layers, (True, False), strict=True):
            layer.gradient.copy_(randoms(layer.gradient.numel(), step).pow_(3))
            stepped(layer, optimizer, hyper, loop=loop)
        same_layers(*layers)
    assert layers[0].optimizer_state.moments_K.keys() == set(optimizer.moments)


@pytest.mark.parametrize("optimizer", [ADAMW, NESTEROV])
@pytest.mark.parametrize(("weight", "gradient"), by_default((STATES[0], STATES[2]), STATES))
def test_what_is_not_finite_is_so_in_the_same_places(
    optimizer: Optimizer, weight: torch.dtype, gradient: torch.dtype
) -> None:
    """Any number meets any other as gradient, master or moment."""
    special = torch.cat([FULL_NAN, SPECIAL])
    size = special.numel()
    mask, moments = torch.ones(size**3, dtype=torch.bool), len(optimizer.moments)
    layers = [layer_of(mask, weight, gradient, moments)[0] for _ in range(2)]
    for layer in layers:
        layer.gradient.copy_(special.repeat(size**2))
        for values in layer.optimizer_state.moments_K.values():
            values.copy_(special.repeat_interleave(size).repeat(size))
        masters = special.repeat_interleave(size**2)
        layer.optimizer_state.write_master(layer.tensors[0], 0, masters)

    for decay in (0.0, 0.1):
        for layer, loop in zip(layers, (True, False), strict=True):
            stepped(layer, optimizer, replace(HYPER, weight_decay=decay), loop=loop)
        same_layers(*layers)


@pytest.mark.parametrize("state", [STATES[0], STATES[1], STATES[3]])
def test_a_share_is_updated_and_the_other_replicas_entries_keep_their_weights(state: Types) -> None:
    """Also a share that begins within a tensor, next to tensors that do not decay."""
    ours, theirs = (two_tensor_share(state) for _ in range(2))
    before = [tensor.weight_D.clone() for tensor in ours.tensors]
    assert 0 < ours.shares.own.start < ours.tensors[0].kept

    stepped(ours, ADAMW, HYPER, loop=True)
    stepped(theirs, ADAMW, HYPER, loop=False)

    same_layers(ours, theirs)
    first = ours.tensors[0]
    foreign = first.index.positions()[: ours.shares.own.start]
    assert torch.equal(first.weight_D[foreign], before[0][foreign])
    assert not torch.equal(ours.tensors[1].weight_D, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_summed_by_a_loop_only_where_there_are_many(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = randoms(FEW + 1, 2, dtype)
    loop = mock.Mock(wraps=host_step.SUM_OF_SQUARES)
    monkeypatch.setattr(host_step, "SUM_OF_SQUARES", loop)

    looped, few = sum_of_squares(values), sum_of_squares(values[:-1])

    loop.assert_called_once()
    exact = math.fsum(value * value for value in values.tolist())
    assert looped == pytest.approx(exact, rel=1e-14)
    assert few + float(values[-1]) ** 2 == pytest.approx(exact, rel=1e-14)
    monkeypatch.setattr(host_step, "can_compile", lambda: False)
    assert sum_of_squares(values) == pytest.approx(exact, rel=1e-14)


def two_tensor_share(state: Types) -> LayerState:
    """The second half of a layer of two tensors, the second of which does not decay."""
    group = cast("Collective", SimpleNamespace(rank=1, size=2))
    masks = {"a": random_mask(8 * BLOCK, 0.3), "b": torch.ones(700, dtype=torch.bool)}
    types = StateFormat(*state, ADAMW.moments, "mask")
    layer = state_of(masks, types, replicas=Replicas(group=group, shard=True))
    layer.tensors[1].decays = False
    for tensor in layer.tensors:
        values = randoms(tensor.kept, 3)
        tensor.index.scatter(tensor.weight_D, round_to(values, state[0]), 0)
        own = tensor.entries_in(layer.shares.held)
        layer.optimizer_state.write_master(tensor, own.start, values[own.start : own.stop])
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    return layer
