"""From a dense gradient to the compressed one in one kernel, and the verdict of a step.

    grad_K ← dense_D[index]            the first gradient of a step
    grad_K ← grad_K + dense_D[index]   the others: added in fp32, rounded to grad_K's type

Together with the last microbatch's, or by themselves once replicas have summed gradients:
whether all are finite, and an fp64 sum of squares for each block of 65,536 kept entries. These
are sums of the same squares as `samo/norm.py`'s, in another fixed order (`source/compress.cuh`),
that depends neither on the encoding nor on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.helpers import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import CHUNK, NUMBERS, THREADS, Launcher, blocks_of, check
from axsparse.samo.shards import BLOCK

NORM_TOLERANCE = 1e-11
"""Relative, of a partial against another order of adding: 65,536 roundings of fp64."""


@dataclass(frozen=True)
class Verdict:
    """What a step has to know of one tensor's gradient; stays on its device."""

    partials: Tensor
    """fp64, the sum of squares of each block of 65,536 kept entries."""
    found: Tensor
    """int32, (1,): 1 once a gradient was not finite. Shared by tensors; nothing resets it."""

    @staticmethod
    def empty(kept: int, found: Tensor) -> Verdict:
        """Of a tensor of so many kept entries, to be filled in."""
        partials = torch.zeros(blocks_of(kept, BLOCK), dtype=torch.float64, device=found.device)
        return Verdict(partials, found)


def compress(
    index: DeviceIndex,
    dense_D: Tensor,
    gradient_K: Tensor,
    *,
    accumulate: bool,
    verdict: Verdict | None = None,
) -> None:
    """Move a dense gradient's kept entries into `gradient_K`, or add them to what is there.

    `dense_D` has the weight's type, `gradient_K` the same or fp32. `verdict` is filled in for
    the sums, if given.
    """
    check(dense_D, "dense gradient", tuple(NUMBERS), index.numel)
    check(gradient_K, "gradient", (dense_D.dtype, torch.float32), index.kept)
    blocks = blocks_of(index.kept, CHUNK)
    chunks = None if verdict is None else _chunks(verdict, blocks)
    dense, gradient = NUMBERS[dense_D.dtype], NUMBERS[gradient_K.dtype]
    index.launch(
        f"compress<{INDICES[index.kind]}, {dense}, {gradient}>",
        blocks,
        dense_D,
        *index.arguments,
        gradient_K,
        np.int32(accumulate),
        chunks,
        None if verdict is None else verdict.found,
    )
    if verdict is not None and chunks is not None:
        _fold(index.launch, chunks, verdict)


def judge(launch: Launcher, gradient_K: Tensor, verdict: Verdict) -> None:
    """The verdict alone, on gradients as they are."""
    check(gradient_K, "gradient", tuple(NUMBERS), gradient_K.numel())
    blocks = blocks_of(gradient_K.numel(), CHUNK)
    chunks = _chunks(verdict, blocks)
    kernel = f"judge<{NUMBERS[gradient_K.dtype]}>"
    launch(kernel, blocks, gradient_K, np.int64(gradient_K.numel()), chunks, verdict.found)
    _fold(launch, chunks, verdict)


def _chunks(verdict: Verdict, blocks: int) -> Tensor:
    """Room for the sums of chunks, which every thread block writes one of."""
    check(verdict.partials, "partials", (torch.float64,), blocks_of(blocks, BLOCK // CHUNK))
    check(verdict.found, "found", (torch.int32,), 1)
    return verdict.partials.new_empty(blocks)


def _fold(launch: Launcher, chunks: Tensor, verdict: Verdict) -> None:
    partials = verdict.partials
    launch(
        "fold",
        blocks_of(partials.numel(), THREADS),
        chunks,
        np.int64(chunks.numel()),
        partials,
        np.int64(partials.numel()),
    )
