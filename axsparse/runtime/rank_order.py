"""Sums whose bits do not depend on who computes them, and the bytes that an exchange hands over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from axsparse.runtime.communication import Op

PIECE = 65_536
"""Entries that `store_sum_in_rank_order` sums at a time."""


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + …; parts of 16 bits are added in fp32 and rounded once."""
    dtype = parts[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if half else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def store_sum_in_rank_order(parts: Sequence[Tensor], into: Tensor) -> None:
    """Write the sum of flat parts to `into`, which may be one of them.

    Two are added by one operation of torch's, which rounds once. More are summed with temporaries
    that stay in the processor's cache.
    """
    if len(parts) == 2:
        torch.add(*parts, out=into)
        return
    for start in range(0, into.numel(), PIECE):
        piece = slice(start, start + PIECE)
        into[piece] = sum_in_rank_order([part[piece] for part in parts])


def exchanged_bytes(op: Op, bounds: Sequence[int], rank: int, itemsize: int) -> int:
    """Bytes that one rank hands over for an operation on shards with these bounds, in entries.

    A reduction sends every other shard to its owner, and a gathering sends the rank's own
    shard to all others. For an all-reduce of n bytes over d ranks this comes to 2 (d − 1) n over
    all ranks, as for a ring.
    """
    size = len(bounds) - 1
    shard = bounds[rank + 1] - bounds[rank]
    total = bounds[-1] - bounds[0]
    entries = 0
    if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER):
        entries += total - shard
    if op in (Op.ALL_REDUCE, Op.ALL_GATHER):
        entries += shard * (size - 1)
    if op is Op.BROADCAST and rank == 0:
        entries += total * (size - 1)
    return entries * itemsize


def exact_sum(values: Sequence[float]) -> tuple[float, float]:
    """The rounded sum of fp64 numbers and the remainder; in any order of the numbers.

    Rounded sum plus remainder are exact for fp32 numbers whose bits span at most 106 binary
    places. A sum that is not finite stays so, with a remainder of 0.
    """
    if not all(map(math.isfinite, values)):
        return sum(values), 0.0
    rounded = math.fsum(values)
    return rounded, math.fsum([*values, -rounded])
