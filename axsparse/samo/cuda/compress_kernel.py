"""From a dense gradient to the compressed one in one kernel, with the sums of its squares.

    grad_K ← dense_D[index]            the first gradient of a step
    grad_K ← grad_K + dense_D[index]   later ones: added in fp32, rounded to grad_K's type

The norm, and whether all gradients are finite, come from one fp64 sum of squares for each block of
65,536 kept entries; it is finite exactly if these entries are. The sums come with the last
microbatch's gradient (`compress`), or from gradients that replicas have summed (`judge`). They add
the squares of `samo/optim/gradient_norm.py` in another fixed order (`source/compress.cuh`), which
depends neither on the encoding nor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import (
    CHUNK,
    JUDGEMENT,
    NUMBERS,
    SUMMED,
    THREADS,
    Launcher,
    blocks_of,
    check,
)
from axsparse.samo.shards import BLOCK

NORM_TOLERANCE = 1e-11
"""The largest relative difference of a sum from one in another order: 65,536 roundings of fp64."""


def compress(
    index: DeviceIndex,
    dense_D: Tensor,
    gradient_K: Tensor,
    *,
    accumulate: bool,
    partials: Tensor | None = None,
) -> None:
    """Move a dense gradient's kept entries into `gradient_K`, or add them to what is there.

    `dense_D` has the weight's type, `gradient_K` the same or fp32. `partials`, if given, receives
    the sums of squares of the new `gradient_K`: fp64, one for each block of 65,536 kept entries.
    """
    check(dense_D, "dense gradient", tuple(NUMBERS), index.numel)
    check(gradient_K, "gradient", (dense_D.dtype, torch.float32), index.kept)
    sums = None if partials is None else _Sums([(gradient_K, partials)])
    dense, gradient = NUMBERS[dense_D.dtype], NUMBERS[gradient_K.dtype]
    index.launch(
        f"compress<{INDICES[index.kind]}, {dense}, {gradient}>",
        blocks_of(index.kept, CHUNK),
        dense_D,
        *index.arguments,
        gradient_K,
        np.int32(accumulate),
        None if sums is None else sums.chunks,
    )
    if sums is not None:
        sums.fold(index.launch)


def judge(launch: Launcher, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Sum the squares of gradients as they are, many tensors in a launch.

    Each part is a gradient of some kept entries and the fp64 tensor that receives its sums, one for
    each block of 65,536 entries.
    """
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for gradient_K, partials in parts:
        check(gradient_K, "gradient", tuple(NUMBERS), gradient_K.numel())
        if gradient_K.numel():
            alike.setdefault(gradient_K.dtype, []).append((gradient_K, partials))
    for dtype, those in alike.items():
        for first in range(0, len(those), SUMMED):
            sums = _Sums(those[first : first + SUMMED])
            launch(f"judge<{NUMBERS[dtype]}>", sums.chunks.numel(), sums.group, sums.chunks)
            sums.fold(launch)


class _Sums:
    """The sums of squares of some gradients, at most SUMMED: first of chunks, then of blocks."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        rows, chunks, blocks = [], 0, 0
        for gradient_K, partials in parts:
            kept = gradient_K.numel()
            check(partials, "partials", (torch.float64,), blocks_of(kept, BLOCK))
            rows.append((gradient_K.data_ptr(), partials.data_ptr(), kept, chunks, blocks))
            chunks += blocks_of(kept, CHUNK)
            blocks += partials.numel()
        self.group = np.zeros(1, JUDGEMENT)
        self.group["tensors"][0, : len(rows)] = rows
        self.group["number"] = len(rows)
        self.chunks = parts[0][1].new_empty(chunks)
        """Room for the sums of chunks; every thread block writes one."""
        self._blocks = blocks

    def fold(self, launch: Launcher) -> None:
        """Write the sums of blocks to where the caller wants them."""
        blocks = blocks_of(self._blocks, THREADS)
        launch("fold", blocks, self.group, self.chunks, np.int64(self._blocks))
