"""Simulates one step of one pipeline, in which every stage plays its real policy object.

A simulation of discrete events, without torch and MPI. Replicas do not exchange anything before
their gradients are summed, so `planner.step_cost` plays each of them by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
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

    @staticmethod
    def uniform(
        g_inter: int, microbatches: int, forward: float, backward: float, weight: float = 0.0
    ) -> Durations:
        return Durations(
            *([[seconds] * microbatches] * g_inter for seconds in (forward, backward, weight))
        )

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
    """The timeline of one stage, in seconds; entry i of the first three lists is its i-th
    action."""

    actions: list[Action] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """The ends of the actions, without the handling of messages that follows them."""
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
    new_policy: Callable[[int], Policy],
    durations: Durations,
    edges: Sequence[MessageCost] | None = None,
) -> PipelineRun:
    """Play one step of a pipeline.

    `new_policy(stage)` makes the policy of a stage. `edges[s]` is the cost of a message between
    the stages s and s + 1, in either direction; by default messages cost nothing. As in the
    engine, a stage takes in all that has arrived before it asks its policy; at equal times
    arrivals come before decisions. Raises RuntimeError for a deadlock.
    """
    g_inter = len(durations.forward)
    if edges is None:
        edges = [MessageCost()] * (g_inter - 1)
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


class _Simulation:
    """A queue of events in order of time: at a stage, a message arrives or a decision is due."""

    def __init__(
        self, stages: list[_Stage], durations: Durations, edges: Sequence[MessageCost]
    ) -> None:
        self._stages = stages
        self._durations = durations
        self._edges = edges
        self._events: list[tuple[float, int, int, int, Message | None]] = []
        """Time, 0 for an arrival or 1 for a decision, number, stage, and arrived message."""
        self._number = 0
        """The number of the last event, which orders events of one time and kind."""

    def play(self) -> PipelineRun:
        """Play all events, from a decision of every stage at time 0."""
        for number in range(len(self._stages)):
            self._decide_at(0.0, number)
        while self._events:
            now, _, _, number, arrival = heapq.heappop(self._events)
            stage = self._stages[number]
            if arrival is not None:
                stage.inbox.append(arrival)
                if stage.is_idle:
                    self._decide_at(max(now, stage.free), number)
            else:
                self._decide(number, now)
        waiting = [number for number, stage in enumerate(self._stages) if not stage.policy.finished]
        if waiting:
            raise RuntimeError(f"a deadlock: stages {waiting} wait for ever")
        runs = [stage.run for stage in self._stages]
        return PipelineRun(max(run.end for run in runs), runs)

    def _decide_at(self, when: float, number: int) -> None:
        self._number += 1
        self._stages[number].is_idle = False
        heapq.heappush(self._events, (when, 1, self._number, number, None))

    def _decide(self, number: int, now: float) -> None:
        stage = self._stages[number]
        if stage.inbox:
            now = stage.free = self._take_in(number, now)
        action = stage.policy.next()
        if action is None:
            stage.is_idle = True
        else:
            self._execute(number, action, now)

    def _take_in(self, number: int, now: float) -> float:
        """Pass the inbox on to the policy; returns when the last message is handled."""
        stage = self._stages[number]
        for direction, microbatch in stage.inbox:
            stage.policy.arrived(direction, microbatch)
            edge = self._edges[number - 1 if direction is Direction.FORWARD else number]
            now = _handle(stage.run, edge, now)
        stage.inbox.clear()
        return now

    def _execute(self, number: int, action: Action, now: float) -> None:
        run = self._stages[number].run
        length = self._durations.of(number, action)
        end = now + length
        run.actions.append(action)
        run.begins.append(now)
        run.ends.append(end)
        run.compute += length
        if action.direction is not None:
            end = self._send(number, action, end)
        run.end = end
        self._decide_at(end, number)

    def _send(self, number: int, action: Action, end: float) -> float:
        """Send an action's result from `end` on; returns when the sending is done."""
        is_forward = action.kind is Kind.FORWARD
        target = number + 1 if is_forward else number - 1
        if not 0 <= target < len(self._stages):
            return end
        edge = self._edges[min(number, target)]
        end = _handle(self._stages[number].run, edge, end)
        self._number += 1
        message = Direction(action.kind), action.microbatch
        heapq.heappush(self._events, (end + edge.latency, 0, self._number, target, message))
        return end


def _handle(run: StageRun, edge: MessageCost, begin: float) -> float:
    """Spend a stage's time on sending or receiving one message; returns when that is done."""
    run.p2p += edge.handling
    return begin + edge.handling
