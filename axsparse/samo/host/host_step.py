"""The optimizer step of tensors on a CPU, in one pass over gradients and state.

Compiled loops read each kept entry's gradient, master and moments once, and write masters, moments
and rounded weights, with the bits of the torch operations of `samo/optim/adamw.py` and
`samo/optim/sgd.py`. `samo/cuda/kernels.py` is the same for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import FEW, Array, Loop, can_compile
from axsparse.samo.optim.optimizer import Hyper, Optimizer, TensorSlot
from axsparse.samo.precision import array_of

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
    SUM_OF_SQUARES(array_of(values), total)
    return float(total[0])


def step(
    optimizer: Optimizer, slots: Sequence[TensorSlot], hyper: Hyper, gradient_factor: float
) -> None:
    """One step of a rule that has a loop, as `step` of `samo/cuda/kernels.py`."""
    rule = optimizer.compiled
    assert rule is not None, "there is no loop of this rule"
    factors = tuple(map(np.float32, rule.factors(hyper)))
    loop, factor = STEPS[rule.name], np.float32(gradient_factor)
    for slot in slots:
        slot.check(optimizer.moments)
        for gradient, moments, masters, weights in _chunks(slot):
            loop(gradient, factor, moments or None, masters, weights, factors)


def _chunks(slot: TensorSlot) -> Iterator[tuple[Array, tuple[Array, ...], Array, Array | None]]:
    """A tensor's held entries as loops take them, a chunk at a time: gradients, which are fp32 or
    the bits of bf16, and the values that the loop replaces: moments, fp32 masters, and the bits of
    bf16 weights (None for other types). What the loop has written is stored before the next
    chunk."""
    index, held = slot.index, slot.held
    is_dense, is_fp16 = index.kept == slot.weight.numel(), slot.gradient.dtype == torch.float16
    # A tensor that is neither gathered nor converted needs no memory, so it is one chunk.
    each = CHUNK if is_fp16 or not is_dense else max(len(held), 1)
    for start in range(held.start, held.stop, each):
        stop = min(start + each, held.stop)
        part = slice(start - held.start, stop - held.start)
        gradient_K = slot.gradient[start:stop]
        if is_dense:
            weight_K = slot.weight[start:stop]
        elif slot.master is None:
            weight_K = index.gather(slot.weight, start, stop)
        else:
            weight_K = slot.weight.new_empty(stop - start)
        masters = array_of(weight_K) if slot.master is None else slot.master[part].numpy()
        yield (
            array_of(gradient_K.float() if is_fp16 else gradient_K),
            tuple(values[part].numpy() for values in slot.moments),
            masters,
            array_of(weight_K) if weight_K.dtype == torch.bfloat16 else None,
        )
        if weight_K.dtype == torch.float16:
            assert slot.master is not None
            weight_K.copy_(slot.master[part])
        if not is_dense:
            index.scatter(slot.weight, weight_K, start)
