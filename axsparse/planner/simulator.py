"""A pipeline's step in simulated time: every stage plays its real policy object.

Discrete events, no torch, no MPI. One run is one replica; replicas do not meet before
their gradients are summed, so a planner plays each of them by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from axsparse.pipeline.actions import Action
from axsparse.pipeline.policy import Policy
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@dataclass(frozen=True)
class Durations:
    """Seconds of every forward and backward, as [stage][microbatch].

    All schedules that are simulated with the same object see the same delays.
    """

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]

    @staticmethod
    def uniform(g_inter: int, microbatches: int, forward: float, backward: float) -> Durations:
        """The same for every stage and microbatch."""
        return Durations(
            [[forward] * microbatches] * g_inter, [[backward] * microbatches] * g_inter
        )


@dataclass(frozen=True)
class MessageCost:
    """What a message costs between two neighbouring stages, in seconds."""

    latency: float = 0.0
    """From the end of the sending to the arrival; nobody's time."""
    handling: float = 0.0
    """Of the sender's time after the action, and of the receiver's before it can use it."""


@dataclass
class StageRun:
    """What one stage did; entry i of the three lists belongs to its i-th action."""

    actions: list[Action]
    begins: list[float]
    ends: list[float]
    """The handling of messages comes after an action and before the next one."""
    compute: float
    """Seconds of forwards and backwards."""
    p2p: float
    """Seconds of handling messages."""
    end: float
    """When its last action and its message were done: from then on it is free to reduce
    its gradients."""
    most_in_flight: int
    """Most forwards at a time without their backward."""
    handled: list[tuple[float, float]]
    """When each message that takes time was handled: begin and end."""


@dataclass(frozen=True)
class PipelineRun:
    """A simulated step, from the first forward to the end of the last stage to finish."""

    seconds: float
    stages: list[StageRun]

    def bubble(self, stage: int) -> float:
        """Seconds in which a stage had nothing to do; compute, p2p and bubble are the step."""
        run = self.stages[stage]
        return self.seconds - run.compute - run.p2p


def simulate(
    new_policy: Callable[[int], Policy],
    durations: Durations,
    edges: Sequence[MessageCost] | None = None,
) -> PipelineRun:
    """Play one step of a pipeline.

    `new_policy(stage)` makes the policies; `edges[s]` joins the stages s and s + 1, both
    ways, and by default costs nothing. A stage takes in all that has arrived before it
    asks its policy, as the engine does; the arrivals of an instant come before its
    decisions. Raises RuntimeError if all stages wait for ever.
    """
    g_inter = len(durations.forward)
    seconds = (durations.forward, durations.backward)
    if edges is None:
        edges = [MessageCost()] * (g_inter - 1)
    assert len(edges) == g_inter - 1, "one edge between each two neighbours"
    policies = [new_policy(stage) for stage in range(g_inter)]
    runs = [StageRun([], [], [], 0.0, 0.0, 0.0, 0, []) for _ in range(g_inter)]
    in_flight = [0] * g_inter
    inboxes: list[list[Action]] = [[] for _ in range(g_inter)]
    idle = [True] * g_inter
    # (when, 0 for an arrival and 1 for a decision, a number that breaks ties, stage, arrival)
    events: list[tuple[float, int, int, int, Action | None]] = []
    number = 0
    for stage in range(g_inter):
        events.append((0.0, 1, number, stage, None))
        number += 1
        idle[stage] = False

    while events:
        now, _, _, stage, arrival = heapq.heappop(events)
        if arrival is not None:
            inboxes[stage].append(arrival)
            if idle[stage]:
                idle[stage] = False
                number += 1
                heapq.heappush(events, (now, 1, number, stage, None))
            continue
        policy, run, inbox = policies[stage], runs[stage], inboxes[stage]
        if inbox:
            for message in inbox:
                policy.arrived(message.direction, message.microbatch)
                handling = edges[stage - 1 if message.direction is FORWARD else stage].handling
                if handling:
                    run.p2p += handling
                    run.handled.append((now, now + handling))
                    now += handling
            inbox.clear()
        action = policy.next()
        if action is None:
            idle[stage] = True
            continue
        direction = action.direction
        length = seconds[direction][stage][action.microbatch]
        end = now + length
        run.actions.append(action)
        run.begins.append(now)
        run.ends.append(end)
        run.compute += length
        if direction is FORWARD:
            in_flight[stage] += 1
            if in_flight[stage] > run.most_in_flight:
                run.most_in_flight = in_flight[stage]
            target, between = stage + 1, stage
        else:
            in_flight[stage] -= 1
            target = between = stage - 1
        if 0 <= target < g_inter:
            edge = edges[between]
            if edge.handling:
                run.p2p += edge.handling
                run.handled.append((end, end + edge.handling))
                end += edge.handling
            number += 1
            heapq.heappush(events, (end + edge.latency, 0, number, target, action))
        run.end = end
        number += 1
        heapq.heappush(events, (end, 1, number, stage, None))

    waiting = [stage for stage, policy in enumerate(policies) if not policy.finished]
    if waiting:
        raise RuntimeError(f"a deadlock: stages {waiting} wait for ever")
    return PipelineRun(max(run.end for run in runs), runs)
