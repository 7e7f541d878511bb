"""Sums of gradients that do not depend on the order of their parts (`samo.gradient: exact`).

An entry g of a microbatch's gradient counts as the integer round(g / unit), ties to even, and the
integers of all microbatches are added in 64 bits. Integers add to the same sum in any order, so
that any number of replicas, and MPI's and NCCL's own sums, give the same bits. `unit` is a power of
two, the same for all entries of a tensor and on all ranks.

A step begins with the units of the step before. A unit admits entries that are 2**MARGIN times as
large as the largest entry that any microbatch had, and becomes smaller by one bit a step while it
could. Where an entry does not fit in spite of that, or the largest one has few bits, all ranks
learn it together, change the unit and compute the step's gradients again. How large the entries of
a microbatch are is the same for every number of stages and replicas. So the units, which decide how
entries are rounded, are the same too.

An integer has 62 bits for the sum of a step. Of 512 microbatches an entry may have 50, of which the
largest entry usually has 41: the rest is the margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import Loop, can_compile
from axsparse.samo.precision import array_of

ADD = Loop("axsparse.samo.host.step_loops", "add_integers")
MARGIN = 8
"""A gradient may be 2**8 times as large as in the step before until its unit must change."""
PARTS = 8
"""The most summands that a microbatch adds to a tensor's sum: two uses of a tied weight, each in up
to four parts, where a layer multiplies with it several times."""
LEAST_BITS = 30
"""A step's gradients are computed again where the largest entry of a tensor has fewer bits."""
FIRST_LARGEST = 10
"""The unit of the first step admits entries of 2**10."""
CHUNK = 65_536
"""Entries that are converted at a time, so that their copies stay in the cache."""


def add(sums_K: Tensor, values_K: Tensor, unit: float, most: Tensor, *, adds: bool) -> None:
    """Add values to int64 sums, `(kept,)`, on the host, or store them if not `adds`.

    `most`, fp32 `(1,)`, has the largest absolute value so far, and is not finite once a value is
    not.
    """
    assert sums_K.shape == values_K.shape, f"{tuple(values_K.shape)} for {tuple(sums_K.shape)}"
    if can_compile():
        # In one pass, with the bits of the operations below wherever all entries fit.
        values_K = values_K.float() if values_K.dtype == torch.float16 else values_K
        largest = most.numpy().view(np.uint32)
        ADD(array_of(values_K), 1 / unit, sums_K.numpy(), int(adds), largest)
        return
    for sums, values in zip(sums_K.split(CHUNK), values_K.split(CHUNK), strict=True):
        if values.numel():  # of some tensors nothing is kept
            torch.maximum(most, values.abs().amax().float(), out=most)
        integers = values.double().mul_(1 / unit).round_().long()
        if adds:
            sums.add_(integers)
        else:
            sums.copy_(integers)


def in_fp32(sums_K: Tensor, part: slice, unit: float) -> None:
    """Replace some int64 sums of a flat buffer on the host by the fp32 gradients that they stand
    for.

    The gradient of entry n is entry n of `sums_K.view(torch.float32)`, which is the same memory: it
    lies where the sum of entry n // 2 was. Parts are converted in ascending order, so that no sum
    is overwritten before it is read.
    """
    values_K = sums_K.view(torch.float32)
    for start in range(part.start, part.stop, CHUNK):
        chunk = slice(start, min(start + CHUNK, part.stop))
        values_K[chunk] = sums_K[chunk].double().mul_(unit)


class UnitFit(IntEnum):
    """How the largest entry of a tensor in any microbatch fits its unit."""

    COARSE = 0
    """The entry has fewer than `LEAST_BITS` bits, and is not zero."""
    ROOMY = 1
    """A unit of half the size would leave the margin as well."""
    GOOD = 2
    TOO_LARGE = 3
    """The entry does not fit."""
    NOT_FINITE = 4


class Units:
    """The units of all tensors, on every rank the same, from step to step."""

    def __init__(self, microbatches: int, exponents: dict[str, int]) -> None:
        """`microbatches` is the number of a step, of all replicas together; `exponents`, which is
        changed from step to step, has the base-2 logarithm of the unit by name of tensor; the two
        uses of a tied weight have one."""
        self._room = 62 - math.ceil(math.log2(PARTS * microbatches))
        """Bits that an entry of one microbatch may have."""
        self._jump = self._room - LEAST_BITS
        """Bits by which a unit changes for the next pass: too large an entry does not become
        coarse, nor a coarse one too large."""
        assert self._jump > 0, "too many microbatches for the range of the sums"
        self._exponents = exponents

    @property
    def limit(self) -> float:
        """The largest entry of a microbatch's gradient, in units."""
        return 2.0**self._room

    def unit(self, name: str) -> float:
        """The unit of a tensor's gradient in the coming step, loss scale included."""
        return 2.0 ** self._exponents.get(name, FIRST_LARGEST - self._room)

    def fit(self, largest: float) -> UnitFit | None:
        """How the largest entry, in units, fits; None if it is zero."""
        if not math.isfinite(largest):
            return UnitFit.NOT_FINITE
        if largest > self.limit:
            return UnitFit.TOO_LARGE
        if largest >= 2.0 ** (self._room - MARGIN - 1):
            return UnitFit.GOOD
        if largest >= 2.0**LEAST_BITS:
            return UnitFit.ROOMY
        return UnitFit.COARSE if largest > 0 else None

    def follow(self, fits: Mapping[str, UnitFit]) -> bool:
        """Choose the units for the next pass; returns whether this step's gradients count, or are
        to be computed again. `fits` has the largest report of all ranks on a tensor."""
        again: dict[str, int] = {}
        smaller: dict[str, int] = {}
        for name, fit in fits.items():
            now = self._exponents.get(name, FIRST_LARGEST - self._room)
            if fit is UnitFit.TOO_LARGE:
                again[name] = now + self._jump
            elif fit is UnitFit.COARSE:
                again[name] = now - self._jump
            elif fit is UnitFit.ROOMY:
                smaller[name] = now - 1
        self._exponents.update(again or smaller)
        return not again
