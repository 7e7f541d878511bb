"""A pipeline whose stages sleep instead of computing; everything else is the package's own.

Ranks that sleep do not compete for cores, so that more of them fit a machine than it has
cores, and what is measured is the schedule. On a machine that is busy with something else a
sleeper wakes late: start the job under `chrt --rr 5`, which puts its few moments first.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.policy import Kind, Policy, action
from axsparse.pipeline.simulator import Durations
from axsparse.runtime.communication import Link
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.grid import Place

if TYPE_CHECKING:
    from axsparse.runtime.mpi.mpi_transport import MpiTransport

START_SECONDS = 0.005
"""From the agreement on a common start to the start."""


@dataclass(frozen=True)
class Emulated:
    """One step as one rank saw it, in seconds."""

    step: float
    """From the common start to the end of the stage that ended last; the same on all ranks."""
    phases: Mapping[str, float]
    """Of this rank, until its own last backward; "step" is their sum."""

    @property
    def bubble(self) -> float:
        """Waiting with nothing runnable, until the last stage has ended."""
        return self.phases["bubble"] + self.step - self.phases["step"]


class SleepingStage:
    """Takes the place of `pipeline.stage.Stage`: sleeps, and sends a scalar."""

    def __init__(self, place: Place, unit_seconds: float) -> None:
        self.durations = Durations((), ())
        """Of the step under way."""
        self._place = place
        self._unit = unit_seconds

    def forward(self, microbatch: int, *_: object) -> tuple[torch.Tensor, ...]:
        self._sleep(Kind.FORWARD, microbatch)
        return (torch.zeros(()),)

    def backward(self, microbatch: int, *_: object) -> list[torch.Tensor | None]:
        self._sleep(Kind.BACKWARD, microbatch)
        return [torch.zeros(())]

    def weight_gradients(self, microbatch: int) -> None:
        self._sleep(Kind.WEIGHT, microbatch)

    def _sleep(self, kind: Kind, microbatch: int) -> None:
        time.sleep(self._unit * self.durations.of(self._place.stage, action(kind, microbatch)))


class GivenPolicies:
    """Takes the place of `pipeline.schedules.Schedule`."""

    def __init__(self, new: Callable[..., Policy]) -> None:
        self._new = new

    def policy(self, *, stage: int, g_inter: int, microbatches: int) -> Policy:
        return self._new(stage=stage, g_inter=g_inter, microbatches=microbatches)


def machine() -> dict[str, Any]:
    """What a result was read on."""
    scheduling = {os.SCHED_OTHER: "normal", os.SCHED_RR: "round robin, before all normal processes"}
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "scheduling": scheduling.get(os.sched_getscheduler(0), "other"),
    }


class EmulatedRank:
    """A rank whose stage sleeps; between steps it keeps what an engine has learnt."""

    def __init__(
        self,
        transport: MpiTransport,
        place: Place,
        link: Link,
        new_policy: Callable[..., Policy],
        unit_seconds: float,
    ) -> None:
        self._transport = transport
        self._phases = Phases()
        self._stage = SleepingStage(place, unit_seconds)
        stage: Any = self._stage
        schedule: Any = GivenPolicies(new_policy)
        self._engine = Engine(
            Rank(place, transport.backoff, self._phases),
            stage,
            link,
            schedule=schedule,
            while_idle=lambda: None,
        )

    def step(self, durations: Durations) -> Emulated:
        """Run one step; all ranks of one host call this together."""
        transport = self._transport
        self._stage.durations = durations
        count = len(durations.forward[0])
        batch = Batch(0, tuple(Microbatch((), None, n, 1) for n in range(count)), num_targets=1)
        # One host has one monotonic clock.
        rows = sum_by_owner(transport.world, transport.backoff, [time.monotonic()])
        start = max(row[0] for row in rows) + START_SECONDS
        time.sleep(max(0.0, start - time.monotonic()))
        self._phases.begin_step()
        self._engine.train(batch, 1.0, 1.0, lambda _: None)
        seconds = self._phases.end_step()
        own = time.monotonic() - start
        rows = sum_by_owner(transport.world, transport.backoff, [own])
        return Emulated(max(row[0] for row in rows), seconds)


def emulate(
    transport: MpiTransport,
    place: Place,
    link: Link,
    new_policy: Callable[..., Policy],
    durations: Durations,
    unit_seconds: float,
) -> Emulated:
    """Run one step; all ranks of one host call this together."""
    return EmulatedRank(transport, place, link, new_policy, unit_seconds).step(durations)
