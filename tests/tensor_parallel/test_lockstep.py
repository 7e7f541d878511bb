"""The ranks of a stage run what the first one decides, whatever has arrived where."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.pipeline.policy import Action, Kind, Policy, Schedule, action
from axsparse.runtime.communication import Direction
from axsparse.tensor_parallel.lockstep import Lockstep


class Told:
    """The ranks of one stage, as one of them sees them: what the first says reaches all others."""

    def __init__(self, rank: int, words: Sequence[deque[list[int]]]) -> None:
        self.rank, self._words = rank, words

    def broadcast(self, words: Sequence[int]) -> None:
        for others in self._words[1:]:
            others.append([int(word) for word in words])

    def next_broadcast(self, count: int) -> list[int] | None:
        own = self._words[self.rank]
        assert not own or len(own[0]) == count
        return own.popleft() if own else None


def stage_of(ranks: int, policies: Sequence[Policy]) -> list[Lockstep]:
    words: list[deque[list[int]]] = [deque() for _ in range(ranks)]
    groups: list[Any] = [Told(rank, words) for rank in range(ranks)]
    make = partial(Lockstep, make=action)
    return [make(group, policy=one) for group, one in zip(groups, policies, strict=True)]


@given(
    stages=st.integers(1, 4),
    ranks=st.sampled_from((2, 3, 4)),
    microbatches=st.integers(1, 8),
    is_split=st.booleans(),
    name=st.sampled_from(("message-driven", "1f1b", "gpipe")),
    order=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_ranks_of_a_stage_run_what_the_first_one_decides(
    stages: int, ranks: int, microbatches: int, is_split: bool, name: Any, order: int
) -> None:
    """Messages reach each rank in a different order; nobody waits for ever."""
    chance = random.Random(order)  # noqa: S311 - test order
    schedule = Schedule(name, 1, split_backward=is_split)
    policies = {}
    for stage in range(stages):
        own = [
            schedule.policy(stage=stage, g_inter=stages, microbatches=microbatches)
            for _ in range(ranks)
        ]
        for rank, policy in enumerate(stage_of(ranks, own)):
            policies[stage, rank] = policy
    mail: dict[tuple[int, int], list[deque[int]]] = {p: [deque(), deque()] for p in policies}
    ran: dict[tuple[int, int], list[Action]] = {place: [] for place in policies}
    for _ in range(400 * len(policies) * microbatches):
        waiting = [place for place in policies if not policies[place].finished]
        if not waiting:
            break
        stage, rank = place = chance.choice(waiting)
        policy = policies[place]
        for direction, arrived in zip(Direction, mail[place], strict=True):
            while arrived and chance.random() < 0.5:
                policy.arrived(direction, arrived.popleft())
        given_out = policy.next()
        if given_out is None:
            continue
        ran[place].append(given_out)
        target = given_out.direction
        if target is not None and 0 <= (there := stage + (1, -1)[target]) < stages:
            mail[there, rank][target].append(given_out.microbatch)

    assert all(policy.finished for policy in policies.values())
    assert all(ran[stage, rank] == ran[stage, 0] for stage, rank in policies)


def test_a_follower_waits_for_its_own_input() -> None:
    schedule = Schedule("message-driven", 1)
    own = [schedule.policy(stage=1, g_inter=3, microbatches=1) for _ in range(2)]
    first, second = stage_of(2, own)
    assert second.next() is None
    first.arrived(Direction.FORWARD, 0)
    assert first.next() == Action(Kind.FORWARD, 0)

    assert second.next() is None
    second.arrived(Direction.FORWARD, 0)
    assert second.next() == Action(Kind.FORWARD, 0)
    assert second.next() is None
