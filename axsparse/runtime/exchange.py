"""Small exchanges between all ranks: texts, sums, and errors that all ranks raise.

An all-to-all exchange grows with the square of the ranks. So the exchanges of every start
(`together`, `text_of_first`) only broadcast how many ranks have failed, or one rank's text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from axsparse.runtime import errors
from axsparse.runtime.communication import Backoff, Collective, Op, Transport, wait
from axsparse.runtime.errors import AxsparseError, ConfigError, everywhere

T = TypeVar("T")


def together(transport: Transport, work: Callable[[], T]) -> T:
    """Do some work on every rank and return its result there.

    All ranks call this together. If the work raises an AxsparseError on any rank, all ranks raise
    the error of the first such rank. Any other exception is a defect and leaves its rank alone.
    """
    result: T | None = None
    failure = ""
    try:
        result = work()
    except AxsparseError as error:
        known = next(c.__name__ for c in type(error).__mro__ if hasattr(errors, c.__name__))
        failure = json.dumps([known, str(error)])
    if sum_of(transport, [float(bool(failure)), 0.0]) != [0.0, 0.0]:
        _raise_first(gather_texts(transport.world, transport.backoff, failure))
    assert result is not None or not failure
    return result  # type: ignore[return-value]  # T may be None itself


def leave_together(transport: Transport) -> None:
    """Wait until all ranks have nothing left to do.

    If another rank does something `together` instead, all ranks raise a ConfigError that names the
    first rank that has ended.
    """
    # The two numbers that `together` sums: ranks that have failed, ranks that have ended.
    if sum_of(transport, [0.0, 1.0]) == [0.0, transport.size]:
        return
    farewell = (
        f"rank {transport.rank}: has ended, and other ranks wait for it; make a Trainer on every "
        "rank of the job, or on none"
    )
    text = json.dumps([ConfigError.__name__, farewell])
    _raise_first(gather_texts(transport.world, transport.backoff, text))


def _raise_first(failures: Sequence[str]) -> None:
    """Raise, on all ranks alike, the failure of the first rank that has one."""
    for failure in failures:
        if failure:
            name, message = json.loads(failure)
            cls: type[AxsparseError] = getattr(errors, name)
            raise everywhere(cls(message))


def sum_of(transport: Transport, values: Sequence[float]) -> list[float]:
    """The sums of every rank's values, whole numbers below 2⁵³; all ranks call this together."""
    sums = torch.tensor(list(values), dtype=torch.float64)
    wait(transport.world.start(Op.ALL_REDUCE, sums), transport.backoff)
    total: list[float] = sums.tolist()
    return total


def text_of_first(transport: Transport, text: str) -> str:
    """Rank 0's text, on all ranks, which call this together; the texts of others do not count."""
    encoded = text.encode(errors="surrogateescape") if transport.rank == 0 else b""
    (length,) = sum_of(transport, [len(encoded)])
    if not length:
        return ""
    buffer = torch.frombuffer(bytearray(encoded or int(length)), dtype=torch.uint8)
    wait(transport.world.start(Op.BROADCAST, buffer), transport.backoff)
    return bytes(buffer.numpy()).decode(errors="surrogateescape")


def sum_by_owner(
    collective: Collective, backoff: Backoff, values: Sequence[float]
) -> list[list[float]]:
    """The values of every rank of the group, in rank order, on all ranks, without rounding.

    All ranks of the group call this together, each with as many values.
    """
    size, count = collective.size, len(values)
    slots = torch.zeros(size, count, dtype=torch.float64)
    slots[collective.rank] = torch.tensor(list(values), dtype=torch.float64)
    wait(collective.start(Op.ALL_REDUCE, slots.view(-1)), backoff)
    gathered: list[list[float]] = slots.tolist()
    return gathered


def gather_texts(collective: Collective, backoff: Backoff, text: str) -> list[str]:
    """The texts of all ranks of the group, in rank order, on all of them; they call this
    together."""
    encoded = text.encode(errors="surrogateescape")
    lengths = (int(row[0]) for row in sum_by_owner(collective, backoff, [len(encoded)]))
    bounds = list(itertools.accumulate(lengths, initial=0))
    buffer = torch.zeros(bounds[-1], dtype=torch.uint8)
    start, stop = bounds[collective.rank], bounds[collective.rank + 1]
    if encoded:
        buffer[start:stop] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    if buffer.numel():
        wait(collective.start(Op.ALL_GATHER, buffer, bounds), backoff)
    everything = bytes(buffer.numpy())
    return [everything[a:b].decode(errors="surrogateescape") for a, b in itertools.pairwise(bounds)]
