"""Combines times and bytes of a step over all ranks, one step late, so that no rank waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Collective, Op, Work, wait


@dataclass(frozen=True)
class StepTotals:
    """The figures of one step over all ranks."""

    step: int
    times: dict[str, float]
    """Mean seconds over ranks, by name."""
    maxima: dict[str, int]
    """Maxima over ranks, by name."""
    each: dict[str, list[float]]
    """The seconds of every rank in rank order, by name."""


@dataclass(frozen=True)
class _Pending:
    """A step whose all-reduce is under way."""

    step: int
    time_names: tuple[str, ...]
    maxima_names: tuple[str, ...]
    buffer: Tensor
    work: Work


class StepGather:
    """Combines each step's figures while the next step runs.

    All ranks push the same steps with the same names in the same order. One all-reduce sums an
    fp64 buffer. It begins with the times, whose sum gives the mean. Then every rank has its own
    slots for the maxima and for the times in `each`. All other ranks have zeros there, so the sum
    is the owner's value, exact for integers up to 2**53.
    """

    def __init__(self, world: Collective, backoff: Backoff, each: Sequence[str] = ()) -> None:
        """`each` names the times whose values on every rank are needed besides their mean."""
        self._world = world
        self._backoff = backoff
        self._each = tuple(each)
        self._pending: _Pending | None = None

    def push(
        self, step: int, times: Mapping[str, float], maxima: Mapping[str, int]
    ) -> StepTotals | None:
        """Start to combine a step, without waiting for it; returns the step pushed before, if any.

        `times` are in seconds, and `maxima` are values of which the largest is needed.
        """
        previous = self.flush()
        rank, size = self._world.rank, self._world.size
        assert all(0 <= value <= 2**53 for value in maxima.values()), f"no exact float: {maxima}"

        slots = [*maxima.values(), *(times[name] for name in self._each)]
        buffer = torch.zeros(len(times) + size * len(slots), dtype=torch.float64)
        own = len(times) + rank * len(slots)
        buffer[: len(times)] = torch.tensor([*times.values()], dtype=torch.float64)
        buffer[own : own + len(slots)] = torch.tensor(slots, dtype=torch.float64)
        work = self._world.start(Op.ALL_REDUCE, buffer)
        self._pending = _Pending(step, tuple(times), tuple(maxima), buffer, work)
        return previous

    def flush(self) -> StepTotals | None:
        """Wait for the step pushed last, and return it; None if there is none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        wait(pending.work, self._backoff)
        times, maxima = len(pending.time_names), len(pending.maxima_names)
        means = (pending.buffer[:times] / self._world.size).tolist()
        slots = pending.buffer[times:].view(self._world.size, maxima + len(self._each))
        largest = slots[:, :maxima].amax(dim=0).tolist()
        return StepTotals(
            step=pending.step,
            times=dict(zip(pending.time_names, means, strict=True)),
            maxima={name: int(v) for name, v in zip(pending.maxima_names, largest, strict=True)},
            each={name: slots[:, maxima + at].tolist() for at, name in enumerate(self._each)},
        )
