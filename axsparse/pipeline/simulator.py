"""Simulates one step of one pipeline, in which every stage plays its real policy object.

A simulation of discrete events, without torch and MPI. Replicas do not exchange anything before
their gradients are summed, so `planner.step_cost` plays each of them by itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from axsparse.pipeline.policy import Action, Kind, Policy
from axsparse.runtime.communication import Direction


@dataclass(frozen=True)
class Durations:
    """Seconds of every action, as [stage][microbatch]."""

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    """The seconds of full backwards, or of the gradients of inputs alone if backwards are split."""
    weight: Sequence[Sequence[float]] = ()
    """The seconds of weight gradients, if backwards are split."""

    def of(self, stage: int, action: Action) -> float:
        return (self.forward, self.backward, self.weight)[action.kind][stage][action.microbatch]


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message between two neighbouring stages, in seconds."""

    latency: float = 0.0
    """Time from the end of sending to the arrival; neither stage is busy meanwhile."""
    handling: float = 0.0
    """Time that the sender is busy after its action, and the receiver before its next one."""


@dataclass
class StageRun:
    """The timeline of one stage, in seconds."""

    actions: list[Action] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    compute: float = 0.0
    p2p: float = 0.0
    end: float = 0.0
    """When the result of its last action was sent."""


@dataclass(frozen=True)
class PipelineRun:
    """A simulated step of one replica, without the reduction of gradients and the optimizer."""

    seconds: float
    """From the start to the end of the last stage."""
    stages: list[StageRun]


def simulate(
    new_policy: Callable[[int], Policy], durations: Durations, edges: Sequence[MessageCost]
) -> PipelineRun:
    """Play one step of a pipeline.

    `new_policy(stage)` makes the policy of a stage. `edges[s]` is the cost of a message between
    the stages s and s + 1, in either direction. As in the engine, a stage takes in all that has
    arrived before it asks its policy; at equal times arrivals come before decisions. Raises
    RuntimeError for a deadlock.
    """
    g_inter = len(durations.forward)
    assert len(edges) == g_inter - 1, "one edge between each two neighbours"
    stages = [_Stage(new_policy(stage)) for stage in range(g_inter)]
    return _Simulation(stages, durations, edges).play()


Message = tuple[Direction, int]


@dataclass
class _Stage:
    policy: Policy
    run: StageRun = field(default_factory=StageRun)
    inbox: list[Message] = field(default_factory=list)
    """Messages that have arrived, before the stage takes them in."""
    is_idle: bool = False
    free: float = 0.0


@dataclass
class _Simulation:
    """A queue of events in order of time: at a stage, a message arrives or a decision is due."""

    stages: list[_Stage]
    durations: Durations
    edges: Sequence[MessageCost]
    events: list[tuple[float, int, int, int, Message | None]] = field(default_factory=list)
    """Time, 0 for an arrival or 1 for a decision, number, stage, and arrived message."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of events, by which events of one time and kind are in order."""

    def play(self) -> PipelineRun:
        """Play all events, from a decision of every stage at time 0."""
        for number in range(len(self.stages)):
            self._decide_at(0.0, number)
        while self.events:
            now, _, _, number, arrival = heapq.heappop(self.events)
            stage = self.stages[number]
            if arrival is not None:
                stage.inbox.append(arrival)
                if stage.is_idle:
                    self._decide_at(max(now, stage.free), number)
            else:
                self._decide(number, now)
        waiting = [number for number, stage in enumerate(self.stages) if not stage.policy.finished]
        if waiting:
            raise RuntimeError(f"a deadlock: stages {waiting} wait for ever")
        runs = [stage.run for stage in self.stages]
        return PipelineRun(max(run.end for run in runs), runs)

    def _decide_at(self, when: float, number: int) -> None:
        self.stages[number].is_idle = False
        self._push(when, 1, number, None)

    def _push(self, when: float, kind: int, number: int, message: Message | None) -> None:
        heapq.heappush(self.events, (when, kind, next(self.numbers), number, message))

    def _decide(self, number: int, now: float) -> None:
        """Pass a stage's inbox on to its policy, and run what that answers."""
        stage = self.stages[number]
        run = stage.run
        for direction, microbatch in stage.inbox:
            stage.policy.arrived(direction, microbatch)
            edge = self.edges[number - 1 if direction is Direction.FORWARD else number]
            run.p2p += edge.handling
            now = stage.free = now + edge.handling
        stage.inbox.clear()
        action = stage.policy.next()
        if action is None:
            stage.is_idle = True
            return
        length = self.durations.of(number, action)
        run.actions.append(action)
        run.begins.append(now)
        run.end = now + length
        run.compute += length
        target = number + 1 if action.kind is Kind.FORWARD else number - 1
        if action.direction is not None and 0 <= target < len(self.stages):
            edge = self.edges[min(number, target)]
            run.p2p += edge.handling
            run.end += edge.handling
            message = action.direction, action.microbatch
            self._push(run.end + edge.latency, 0, target, message)
        self._decide_at(run.end, number)
