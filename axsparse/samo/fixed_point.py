"""Sums of gradients that do not depend on the order of their parts (`samo.gradient: exact`).

An entry g of a microbatch's gradient counts as the integer round(g / unit), ties to even, and the
integers of all microbatches are added in 64 bits. Integers add to the same sum in any order, so
that any number of replicas, and MPI's and NCCL's own sums, give the same bits. `unit` is a power of
two, the same for all entries of a tensor and on all ranks.

The unit of a step follows from the tensor's gradient in the step before, so that sums have room for
a gradient that is 2**MARGIN times as large. Where a gradient does not fit in spite of that, or is
so small that its sum has few bits, all ranks see it together, choose another unit and compute the
step's gradients again. All that they look at is the same for every number of stages and replicas:
whether an entry of any microbatch is too large, and norms of sums that are exact. So the units,
which decide how entries are rounded, are the same too.

An integer has 62 bits for the sum of a step. Of 512 microbatches an entry may have 50, of which a
usual largest entry has 33 to 42: the rest is the margin, and a norm stands for the largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import FEW, Loop, can_compile

ADD = Loop("axsparse.samo.host.step_loops", "add_integers")
MARGIN = 8
"""A gradient may be 2**8 times as large as that of the step before until its unit must change."""
PARTS = 8
"""What a microbatch may add to a tensor's sum, in units of its largest part: two uses of a tied
weight, each in up to four parts, where a layer multiplies with it several times."""
LEAST_BITS = 30
"""A step's gradients are computed again where the norm of a tensor's has fewer bits."""
RAISED = 24
"""By how many bits a unit rises where an entry is too large."""
FIRST_LARGEST = 10
"""The unit of the first step has room for entries of 2**10."""
CHUNK = 65_536
"""Entries that are converted at a time, so that their copies stay in the processor's cache."""


def add(sums_K: Tensor, values_K: Tensor, unit: float, *, adds: bool) -> Tensor:
    """Add values to int64 sums, `(kept,)`, or store them if not `adds`; returns the largest
    absolute value in units, fp64, which is not finite where a value is not."""
    assert sums_K.shape == values_K.shape, f"{tuple(values_K.shape)} for {tuple(sums_K.shape)}"
    if values_K.device.type == "cpu" and sums_K.numel() > FEW and can_compile():
        return _add_by_loop(sums_K, values_K, unit, adds=adds)
    largest = torch.zeros((), dtype=torch.float64, device=values_K.device)
    for start in range(0, sums_K.numel(), CHUNK):
        sums = sums_K[start : start + CHUNK]
        scaled = values_K[start : start + CHUNK].double().mul_(1 / unit)
        low, high = scaled.aminmax()
        largest = torch.maximum(largest, torch.maximum(-low, high))
        integers = scaled.round_().long()
        if adds:
            sums.add_(integers)
        else:
            sums.copy_(integers)
    return largest


def _add_by_loop(sums_K: Tensor, values_K: Tensor, unit: float, *, adds: bool) -> Tensor:
    """As `add`, with the same bits wherever all entries fit."""
    if values_K.dtype == torch.float16:
        values_K = values_K.float()
    values = (values_K.view(torch.uint16) if values_K.itemsize == 2 else values_K).numpy()
    most = np.zeros(1, dtype=np.uint32)
    ADD(values, 1 / unit, sums_K.numpy(), int(adds), most)
    return torch.from_numpy(most.view(np.float32))[0].double() / unit


def in_fp32(sums_K: Tensor, part: slice, unit: float) -> None:
    """Replace some int64 sums of a flat buffer by the fp32 gradients that they stand for.

    The gradient of entry n is entry n of `sums_K.view(torch.float32)`, which is the same memory: it
    lies where the sum of entry n // 2 was. Parts are converted in ascending order, so that no sum
    is overwritten before it is read.
    """
    values_K = sums_K.view(torch.float32)
    for start in range(part.start, part.stop, CHUNK):
        chunk = slice(start, min(start + CHUNK, part.stop))
        values_K[chunk] = sums_K[chunk].double().mul_(unit)


class Units:
    """The units of all tensors, on every rank the same, from step to step."""

    def __init__(self, microbatches: int) -> None:
        """`microbatches` is the number of a step, of all replicas together."""
        self._room = 62 - math.ceil(math.log2(PARTS * microbatches))
        """Bits that an entry of one microbatch may have."""
        self.exponents: dict[str, int] = {}
        """By name of tensor, the base-2 logarithm of its unit. Both uses of a tied weight have one
        unit, under the name of the first. A checkpoint has all exponents."""
        self._raised: set[str] = set()
        """The tensors for which an entry was too large in this step."""

    @property
    def limit(self) -> float:
        """The largest entry of a microbatch's gradient, in units."""
        return 2.0**self._room

    def unit(self, name: str) -> float:
        """The unit of a tensor's unscaled gradient in the coming step."""
        return 2.0 ** self.exponents.get(name, FIRST_LARGEST - self._room)

    def follow(self, too_large: frozenset[str], sizes: Mapping[str, float]) -> bool:
        """Choose the units for the next pass; returns whether this step's gradients count, or are
        to be computed again.

        `too_large` has the tensors of which some microbatch had an entry beyond `limit`. `sizes`
        are the norms of the tensors' gradients, or their largest part, which are at least as large
        as any entry; they mean nothing for tensors in `too_large`.
        """
        self._raised |= too_large
        again: dict[str, int] = {}
        following: dict[str, int] = {}
        for name, size in sizes.items():
            now = self.exponents.get(name, FIRST_LARGEST - self._room)
            if name in too_large:
                again[name] = now + RAISED
            elif size > 0:
                exponent = math.frexp(size)[1]
                fitting = exponent + MARGIN - self._room
                is_coarse = exponent - now < LEAST_BITS
                if is_coarse and name not in self._raised:
                    again[name] = fitting
                else:
                    # A unit that was too small a moment ago falls slowly, or it might be so again.
                    following[name] = max(fitting, now - 1)
        self.exponents.update(again or following)
        if not again:
            self._raised.clear()
        return not again
