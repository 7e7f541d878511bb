"""Times and bytes of a step, combined over all ranks one step late, so that nobody waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.comm import Backoff, Collective, Op, Work, wait


@dataclass(frozen=True)
class Gathered:
    """One step as all ranks saw it."""

    step: int
    times: dict[str, float]
    """Seconds, mean over ranks."""
    maxima: dict[str, int]
    """Maximum over ranks."""


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

    All ranks push the same steps with the same names in the same order. The fp64 buffer
    holds the times, which the all-reduce sums, then a slot per rank and maximum (rank by
    rank), where zeros from all others make the sum the owner's own value: exact for
    integers up to 2**53, and one operation for both.
    """

    def __init__(self, world: Collective, backoff: Backoff) -> None:
        self._world = world
        self._backoff = backoff
        self._pending: _Pending | None = None

    def push(
        self, step: int, times: Mapping[str, float], maxima: Mapping[str, int]
    ) -> Gathered | None:
        """Start combining a step, without waiting for it; returns the step pushed before."""
        previous = self.flush()
        rank, size = self._world.rank, self._world.size
        assert all(0 <= value <= 2**53 for value in maxima.values()), f"no exact float: {maxima}"

        buffer = torch.zeros(len(times) + size * len(maxima), dtype=torch.float64)
        own = len(times) + rank * len(maxima)
        buffer[: len(times)] = torch.tensor([*times.values()], dtype=torch.float64)
        buffer[own : own + len(maxima)] = torch.tensor([*maxima.values()], dtype=torch.float64)
        work = self._world.start(Op.ALL_REDUCE, buffer)
        self._pending = _Pending(step, tuple(times), tuple(maxima), buffer, work)
        return previous

    def flush(self) -> Gathered | None:
        """Wait for the step pushed last and return it; None if there is none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        wait(pending.work, self._backoff)
        sums, slots = pending.buffer.split(
            [len(pending.time_names), self._world.size * len(pending.maxima_names)]
        )
        means = (sums / self._world.size).tolist()
        largest = slots.view(self._world.size, len(pending.maxima_names)).amax(dim=0).tolist()
        return Gathered(
            step=pending.step,
            times=dict(zip(pending.time_names, means, strict=True)),
            maxima={name: int(v) for name, v in zip(pending.maxima_names, largest, strict=True)},
        )
