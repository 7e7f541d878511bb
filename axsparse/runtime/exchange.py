"""Small exchanges between all ranks: values, errors, and sums whose bits depend on no rank.

Every call that all ranks make together begins or ends with a `meet`, at which they learn that none
does something else. An all-to-all exchange grows with the square of the ranks, so a `meet` and
`value_of_first` only sum four numbers, or broadcast one rank's value.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from axsparse.runtime import errors
from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.errors import AxsparseError, ConfigError, everywhere

T = TypeVar("T")

CODES = 2**16
"""How many numbers stand for what ranks do: squares of smaller ones are added exactly."""


def meet(
    transport: Transport, doing: str, failure: AxsparseError | None = None, value: float = 0.0
) -> float:
    """Let all ranks learn that all of them do the same; returns the sum of their values.

    `doing` completes "rank 3 …", such as "calls evaluate() after step 2"; it is the same text on
    all ranks. All raise the failure of the first rank that has one, else ConfigError if one does
    something else than rank 0.
    """
    code = float(zlib.crc32(doing.encode()) % CODES)
    sums = sum_of(transport, [float(failure is not None), code, code**2, value])
    failed, codes, squares, total = sums
    if not failed and transport.size * int(squares) == int(codes) ** 2:
        return total
    error: list[str] = []
    if failure is not None:
        known = next(c.__name__ for c in type(failure).__mro__ if hasattr(errors, c.__name__))
        error = [known, str(failure)]
    first, *others = gather_values(transport, [doing, *error])
    for _, *error in (first, *others):
        if error:
            cls: type[AxsparseError] = getattr(errors, error[0])
            raise everywhere(cls(error[1]))
    rank, odd = next((r, said[0]) for r, said in enumerate(others, 1) if said[0] != first[0])
    raise everywhere(
        ConfigError(
            f"rank {rank} {odd}, and rank 0 {first[0]}; make the same trainers on all ranks, and "
            "the same calls of them in the same order (`if trainer.rank == 0` is for what no other "
            "rank does)"
        )
    )


def together(
    transport: Transport, work: Callable[[], T], doing: str = "is in the middle of a call"
) -> T:
    """Do some work on every rank and return its result there.

    All ranks call this together; `doing` is as in `meet`. If the work raises an AxsparseError on
    any rank, all ranks raise the error of the first such rank. Any other exception is a defect and
    leaves its rank alone.
    """
    result: T | None = None
    failure: AxsparseError | None = None
    try:
        result = work()
    except AxsparseError as error:
        failure = error
    meet(transport, doing, failure)
    return result  # type: ignore[return-value]  # T may be None itself


def leave_together(transport: Transport, has_spoken: bool = False) -> bool:
    """Wait until all ranks have nothing left to do, and return whether one `has_spoken`;
    ConfigError on all if one makes a call instead."""
    return meet(transport, "has ended", value=float(has_spoken)) > 0


def sum_of(transport: Transport, values: Sequence[float]) -> list[float]:
    """The sums of every rank's values, whole numbers below 2⁵³; all ranks call this together."""
    sums = torch.tensor(list(values), dtype=torch.float64)
    wait(transport.world.start(Op.ALL_REDUCE, sums), transport.backoff)
    total: list[float] = sums.tolist()
    return total


def value_of_first(transport: Transport, value: Any) -> Any:
    """Rank 0's value, as JSON has it, on all ranks, which call this together; the values of others
    do not count."""
    encoded = json.dumps(value).encode() if transport.rank == 0 else b""
    (length,) = sum_of(transport, [len(encoded)])
    buffer = torch.frombuffer(bytearray(encoded or int(length)), dtype=torch.uint8)
    wait(transport.world.start(Op.BROADCAST, buffer), transport.backoff)
    return json.loads(bytes(buffer.numpy()))


def gather_numbers(transport: Transport, values: Sequence[float]) -> list[list[float]]:
    """The values of every rank, in rank order, on all ranks, without rounding. All ranks call this
    together, each with as many values."""
    slots = torch.zeros(transport.size, len(values), dtype=torch.float64)
    slots[transport.rank] = torch.tensor(list(values), dtype=torch.float64)
    wait(transport.world.start(Op.ALL_REDUCE, slots.view(-1)), transport.backoff)
    gathered: list[list[float]] = slots.tolist()
    return gathered


def gather_values(transport: Transport, value: Any) -> list[Any]:
    """The values of all ranks, as JSON has them, in rank order, on all ranks, which call this
    together."""
    encoded = json.dumps(value).encode()
    lengths = (int(row[0]) for row in gather_numbers(transport, [len(encoded)]))
    bounds = list(itertools.accumulate(lengths, initial=0))
    buffer = torch.zeros(bounds[-1], dtype=torch.uint8)
    start, stop = bounds[transport.rank], bounds[transport.rank + 1]
    buffer[start:stop] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    wait(transport.world.start(Op.ALL_GATHER, buffer, bounds), transport.backoff)
    everything = bytes(buffer.numpy())
    return [json.loads(everything[a:b]) for a, b in itertools.pairwise(bounds)]


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
    """Write the sum of flat parts to `into`, which may be one of them, with temporaries that stay
    in the processor's cache."""
    if len(parts) == 2:  # one operation of torch's rounds once
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
