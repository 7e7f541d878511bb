"""Kernels on the state of tensors: compress gradients, sum their squares, update, and expand.

    grad_K ← dense_D[index]            the first gradient of a step
    grad_K ← grad_K + dense_D[index]   later ones: added in fp32, rounded to grad_K's type
    sums_K ← sums_K + round(dense_D[index] / unit)   likewise, where sums are exact

The norm, and whether all gradients are finite, come from one fp64 sum of squares for each block of
65,536 kept entries (`sum_squares`); it is finite exactly if these entries are. They add the squares
of `samo/optim/update.py` in another fixed order (`source/compress.cuh`).

The step is one kernel for tensors of the same types (`source/step.cuh`), which needs no temporary.
Every operation rounds as the functions on a CPU with fused multiply-add do, so results have the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import (
    CHUNK,
    GROUP,
    NORM_INPUTS,
    NUMBERS,
    SUMMED,
    TENSORS,
    THREADS,
    TILE,
    Launcher,
    blocks_of,
    check,
    pointer,
)
from axsparse.samo.optim.optimizer import Hyper, Optimizer, TensorSlot
from axsparse.samo.shards import BLOCK


def compress(index: DeviceIndex, dense_D: Tensor, gradient_K: Tensor, *, accumulate: bool) -> None:
    """Move a dense gradient's kept entries into `gradient_K`, or add them to it.

    `dense_D` has the weight's type, `gradient_K` the same or fp32.
    """
    check(dense_D, "dense gradient", tuple(NUMBERS), index.numel)
    check(gradient_K, "gradient", (dense_D.dtype, torch.float32), index.kept)
    types = f"{NUMBERS[dense_D.dtype]}, {NUMBERS[gradient_K.dtype]}"
    index.launch(
        f"compress<{INDICES[index.kind]}, {types}>",
        blocks_of(index.kept, CHUNK),
        dense_D,
        *index.arguments,
        gradient_K,
        np.int32(accumulate),
    )


def expand(index: DeviceIndex, values_K: Tensor, dense_D: Tensor) -> None:
    """The operation of `Backend.expand`, with the same bits."""
    check(dense_D, "weight", tuple(NUMBERS), index.numel)
    check(values_K, "values", (dense_D.dtype, torch.float32), index.kept)
    types = f"{NUMBERS[dense_D.dtype]}, {NUMBERS[values_K.dtype]}"
    kernel = f"expand<{INDICES[index.kind]}, {types}>"
    index.launch(kernel, blocks_of(index.numel, TILE), dense_D, *index.arguments, values_K)


def add_exact(
    index: DeviceIndex,
    dense_D: Tensor,
    sums_K: Tensor,
    unit: float,
    most: Tensor,
    *,
    accumulate: bool,
) -> None:
    """The operation of `fixed_point.add` on a dense gradient's kept entries, with the same bits."""
    check(dense_D, "dense gradient", tuple(NUMBERS), index.numel)
    check(sums_K, "sums", (torch.int64,), index.kept)
    check(most, "largest entry", (torch.float32,), 1)
    index.launch(
        f"add_exact<{INDICES[index.kind]}, {NUMBERS[dense_D.dtype]}>",
        blocks_of(index.kept, CHUNK),
        dense_D,
        *index.arguments,
        sums_K,
        np.float64(1 / unit).view(np.int64),
        most,
        np.int32(accumulate),
    )


def finish_exact(launch: Launcher, sums: Tensor, part: slice, unit: float) -> None:
    """The operation of `fixed_point.in_fp32`, with the same bits."""
    check(sums, "sums", (torch.int64,), sums.numel())
    first = part.start
    while first < part.stop:
        # Several thread blocks may run where none writes to what another reads.
        last = min(max(2 * first, first + CHUNK), part.stop)
        blocks, bits = blocks_of(last - first, CHUNK), np.float64(unit).view(np.int64)
        launch("finish_exact", blocks, sums, np.int64(first), np.int64(last), bits)
        first = last


def sum_squares(launch: Launcher, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Sum the squares of gradients, many tensors in a launch.

    Each part is a gradient of some kept entries and the fp64 tensor that receives its sums, one for
    each block of 65,536 entries.
    """
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for gradient_K, partials in parts:
        check(gradient_K, "gradient", tuple(NUMBERS), gradient_K.numel())
        check(partials, "partials", (torch.float64,), blocks_of(gradient_K.numel(), BLOCK))
        if gradient_K.numel():
            alike.setdefault(gradient_K.dtype, []).append((gradient_K, partials))
    for dtype, those in alike.items():
        for first in range(0, len(those), SUMMED):
            rows, chunks, blocks = [], 0, 0
            for gradient_K, partials in those[first : first + SUMMED]:
                kept = gradient_K.numel()
                rows.append((gradient_K.data_ptr(), partials.data_ptr(), kept, chunks, blocks))
                chunks += blocks_of(kept, CHUNK)
                blocks += partials.numel()
            group = np.zeros(1, NORM_INPUTS)
            group["tensors"][0, : len(rows)] = rows
            group["number"] = len(rows)
            sums = those[0][1].new_empty(chunks)  # of chunks; every thread block writes one
            launch(f"sum_squares<{NUMBERS[dtype]}>", chunks, group, sums)
            launch("fold", blocks_of(blocks, THREADS), group, sums, np.int64(blocks))


# -- the step -----------------------------------------------------------------------------------


def step(
    optimizer: Optimizer, slots: Sequence[TensorSlot], hyper: Hyper, gradient_factor: float
) -> None:
    """One step of a rule that has a kernel: a thread block for each tile of each tensor, up to
    GROUP tensors of the same types at a time.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale).
    """
    rule = optimizer.compiled
    assert rule is not None, "there is no kernel of this rule"
    alike: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        slot.check(optimizer.moments)
        alike.setdefault(_types(slot), []).append(slot)
    # Computed in fp64 and rounded, as torch does.
    factors = [np.float32(factor) for factor in (gradient_factor, *rule.factors(hyper))]
    for types, those in alike.items():
        kernel = f"step_{rule.name}<{', '.join(filter(None, (types, rule.variant)))}>"
        for first in range(0, len(those), GROUP):
            tensors, blocks = [], 0
            for slot in those[first : first + GROUP]:
                tensors.append(_packed(slot, blocks))
                blocks += blocks_of(slot.weight.numel(), TILE)
            group = np.zeros(1, TENSORS)
            group["tensors"][0, : len(tensors)] = tensors
            group["number"] = len(tensors)
            _index(those[0]).launch(kernel, blocks, group, *factors)


def _types(slot: TensorSlot) -> str:
    weight, gradient = NUMBERS[slot.weight.dtype], NUMBERS[slot.gradient.dtype]
    return f"{INDICES[_index(slot).kind]}, {weight}, {gradient}"


def _index(slot: TensorSlot) -> DeviceIndex:
    index = slot.index.on_device
    assert index is not None, "kernels run where the index is on their device"
    return index


def _packed(slot: TensorSlot, block: int) -> tuple[int, ...]:
    """The fields of a TENSOR whose first thread block has number `block`."""
    index, moments = _index(slot), (*slot.moments, None, None)
    return (
        slot.weight.data_ptr(),
        pointer(index.entries),
        pointer(index.offsets),
        index.kept,
        index.numel,
        slot.gradient.data_ptr(),
        pointer(slot.master),
        pointer(moments[0]),
        pointer(moments[1]),
        slot.held.start,
        slot.held.stop,
        block,
    )
