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

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import CHUNK, NUMBERS, THREADS, Launcher, blocks_of, check
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
    blocks = blocks_of(index.kept, CHUNK)
    chunks = None if partials is None else _chunks(partials, blocks)
    dense, gradient = NUMBERS[dense_D.dtype], NUMBERS[gradient_K.dtype]
    index.launch(
        f"compress<{INDICES[index.kind]}, {dense}, {gradient}>",
        blocks,
        dense_D,
        *index.arguments,
        gradient_K,
        np.int32(accumulate),
        chunks,
    )
    if partials is not None and chunks is not None:
        _fold(index.launch, chunks, partials)


def judge(launch: Launcher, gradient_K: Tensor, partials: Tensor) -> None:
    """Write the sums of squares of the gradients as they are to `partials`."""
    check(gradient_K, "gradient", tuple(NUMBERS), gradient_K.numel())
    blocks = blocks_of(gradient_K.numel(), CHUNK)
    chunks = _chunks(partials, blocks)
    kernel = f"judge<{NUMBERS[gradient_K.dtype]}>"
    launch(kernel, blocks, gradient_K, np.int64(gradient_K.numel()), chunks)
    _fold(launch, chunks, partials)


def _chunks(partials: Tensor, blocks: int) -> Tensor:
    """Room for the sums of chunks; every thread block writes one."""
    check(partials, "partials", (torch.float64,), blocks_of(blocks, BLOCK // CHUNK))
    return partials.new_empty(blocks)


def _fold(launch: Launcher, chunks: Tensor, partials: Tensor) -> None:
    launch(
        "fold",
        blocks_of(partials.numel(), THREADS),
        chunks,
        np.int64(chunks.numel()),
        partials,
        np.int64(partials.numel()),
    )
