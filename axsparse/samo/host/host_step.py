"""The whole optimizer step of tensors on a CPU, in one pass over gradients and state.

Compiled loops read each kept entry's gradient, master and moments once, and write masters, moments
and rounded weights, with the bits of the torch operations of `samo/optim/adamw.py` and
`samo/optim/sgd.py`. `samo/cuda/kernels.py` is the same for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import FEW, Array, Loop, can_compile
from axsparse.samo.optim.optimizer import Hyper, Optimizer, TensorSlot

STEPS = {name: Loop("axsparse.samo.host.step_loops", f"{name}_step") for name in ("adamw", "sgd")}
SUM_OF_SQUARES = Loop("axsparse.samo.host.step_loops", "sum_of_squares")
CHUNK = 65_536
"""Kept entries that are updated at a time where they are gathered, scattered or converted."""


def sum_of_squares(values: Tensor) -> float:
    """The sum of a flat tensor's squares in fp64, on a CPU: in one pass where there is a loop for
    its type that is worth compiling."""
    if values.numel() <= FEW or values.dtype == torch.float16 or not can_compile():
        return float(values.double().square_().sum())
    total = np.empty(1)
    SUM_OF_SQUARES(_array(values), total)
    return float(total[0])


def step(
    optimizer: Optimizer, slots: Sequence[TensorSlot], hyper: Hyper, gradient_factor: float
) -> None:
    """One step of a rule that has a loop, as `step` of `samo/cuda/kernels.py`."""
    rule = optimizer.compiled
    assert rule is not None, "there is no loop of this rule"
    loop, factor = STEPS[rule.name], np.float32(gradient_factor)
    factors = tuple(map(np.float32, rule.factors(hyper)))
    for slot in slots:
        slot.check(optimizer.moments)
        for chunk in _chunks(slot):
            loop(chunk.gradient, factor, chunk.moments or None, *chunk.weights, factors)


@dataclass(frozen=True)
class _Chunk:
    """Kept entries of one tensor as loops take them; all are arrays of one length."""

    gradient: Array
    """fp32, or the bits of bf16."""
    moments: tuple[Array, ...]
    weights: tuple[Array | None, Array | None, Array | None]
    """What the loop replaces: fp32 masters (None where they are joined of weight and remainder),
    the bits of bf16 weights (None for other types), and the remainders, if there are any."""


def _chunks(slot: TensorSlot) -> Iterator[_Chunk]:
    """The chunks of a tensor's held entries; what the caller has changed in each is stored before
    the next one."""
    index, held, kind = slot.index, slot.held, slot.master_kind
    is_dense = index.kept == slot.weight.numel()
    gradients = None if slot.gradient.dtype == torch.float16 else _array(slot.gradient)
    moments = [values.numpy() for values in slot.moments]
    stored = None if slot.master is None else slot.master.numpy()
    # What needs no memory of its own is one chunk.
    each = CHUNK if not is_dense or gradients is None else max(len(held), 1)
    for start in range(held.start, held.stop, each):
        stop = min(start + each, held.stop)
        own = slice(start - held.start, stop - held.start)
        if is_dense:
            weight_K = slot.weight[start:stop]
        elif kind == "fp32":
            weight_K = slot.weight.new_empty(stop - start)
        else:
            weight_K = index.gather(slot.weight, start, stop)
        masters = _array(weight_K) if stored is None else stored[own]
        yield _Chunk(
            slot.gradient[start:stop].float().numpy()
            if gradients is None
            else gradients[start:stop],
            tuple(values[own] for values in moments),
            (
                None if kind == "remainder" else masters,
                _array(weight_K) if weight_K.dtype == torch.bfloat16 else None,
                masters if kind == "remainder" else None,
            ),
        )
        if weight_K.dtype == torch.float16:
            assert slot.master is not None
            weight_K.copy_(slot.master[own])
        if not is_dense:
            index.scatter(slot.weight, weight_K, start)


def _array(values: Tensor) -> Array:
    """An fp32 tensor as an array of numbers, a bf16 one as an array of bits."""
    array: Array = (values.view(torch.uint16) if values.itemsize == 2 else values).numpy()
    return array
