"""The policy under any arrival order: all stages of a pipeline played against each other; schedules
as lists of actions.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.action_text import from_text, to_text

from axsparse.pipeline.policy import (
    Action,
    InOrder,
    Kind,
    MessageDriven,
    Policy,
    action,
    forwards,
    gpipe,
    one_forward_one_backward,
    with_weights,
)
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@dataclass(frozen=True)
class Setting:
    """A pipeline, the bounds of its stages, and the seed from which its arrival order is drawn."""

    microbatches: int
    bounds: list[int]
    is_split: bool
    order: int

    def policies(self) -> list[MessageDriven]:
        return [
            MessageDriven(
                stage=stage,
                g_inter=len(self.bounds),
                microbatches=self.microbatches,
                bound=bound,
                is_split=self.is_split,
            )
            for stage, bound in enumerate(self.bounds)
        ]

    def play(self) -> list[StageLog]:
        return play(self.policies(), self.microbatches, self.order)


SETTINGS = st.builds(
    Setting,
    microbatches=st.integers(1, 20),
    bounds=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    is_split=st.booleans(),
    order=st.integers(0, 2**32),
)


@dataclass(frozen=True)
class StepContext:
    """The runnable actions of a stage by kind, and its policy's answer (None: wait)."""

    action: Action | None
    here: tuple[int, ...]
    """Inputs that have arrived, or that the stage has made itself."""
    begun: tuple[int, ...]

    def has(self, kind: Kind) -> bool:
        """Whether the input of a further action of this kind is there."""
        return self.begun[kind] < self.here[kind]

    @property
    def in_flight(self) -> int:
        return self.begun[Kind.FORWARD] - self.begun[Kind.BACKWARD]

    @property
    def deferred(self) -> int:
        """Microbatches that wait for their weight gradients, if backwards are split."""
        return self.begun[Kind.BACKWARD] - self.begun[Kind.WEIGHT]


@dataclass
class StageLog:
    """The arrivals and actions of one stage, kept apart from the policy's own counts."""

    here: list[int]
    begun: list[int] = field(default_factory=lambda: [0, 0, 0])
    moments: list[StepContext] = field(default_factory=list)

    def note(self, action: Action | None) -> None:
        self.moments.append(StepContext(action, tuple(self.here), tuple(self.begun)))
        if action is not None:
            self.begun[action.kind] += 1

    @property
    def actions(self) -> list[Action]:
        return [moment.action for moment in self.moments if moment.action is not None]


def play(
    policies: list[MessageDriven] | list[InOrder],
    microbatches: int,
    order: int,
    before_each: Callable[[int, Policy, StageLog], None] = lambda stage, policy, log: None,
) -> list[StageLog]:
    """Run a pipeline to its end; at each point, chance picks the stage or link that moves.

    Links deliver first-in-first-out; nothing else is promised.
    """
    chance = random.Random(order)  # noqa: S311 - an arrival order
    last = len(policies) - 1
    logs = [StageLog([0 if stage else microbatches, 0, 0]) for stage in range(len(policies))]
    links: dict[tuple[int, Direction], deque[int]] = {
        (stage, direction): deque() for stage in range(len(policies)) for direction in Direction
    }
    resting: set[int] = set()
    while True:
        moves: list[int | tuple[int, Direction]] = [key for key, queue in links.items() if queue]
        moves += [stage for stage in range(len(policies)) if stage not in resting]
        if not moves:
            return logs
        move = chance.choice(moves)
        if isinstance(move, tuple):
            stage, direction = move
            policies[stage].arrived(direction, links[move].popleft())
            logs[stage].here[direction] += 1
            resting.discard(stage)
            continue
        before_each(move, policies[move], logs[move])
        action = policies[move].next()
        logs[move].note(action)
        # One moment an action and one a wait, and each wait ends with an arrival.
        assert len(logs[move].moments) <= 5 * microbatches + 1, "the run does not end"
        if action is None:
            resting.add(move)
        elif action.direction is FORWARD and move < last:
            links[move + 1, FORWARD].append(action.microbatch)
        elif action.direction is BACKWARD and move > 0:
            links[move - 1, BACKWARD].append(action.microbatch)
        elif action.direction is FORWARD:
            logs[move].here[BACKWARD] += 1  # the loss is the last stage's own
        if action is not None and action.kind is Kind.BACKWARD:
            logs[move].here[Kind.WEIGHT] += 1


def runnable(setting: Setting, stage: int, moment: StepContext) -> tuple[bool, bool, bool]:
    """Whether a forward, a backward and weight gradients could have been run at a moment."""
    bound = setting.bounds[stage]
    unfinished = moment.in_flight + (moment.deferred if setting.is_split else 0)
    return (
        moment.has(Kind.FORWARD) and moment.in_flight < bound and unfinished < 2 * bound,
        moment.has(Kind.BACKWARD),
        setting.is_split and moment.has(Kind.WEIGHT),
    )


many = settings(deadline=None, derandomize=True, max_examples=150)


@many
@given(SETTINGS)
def test_every_run_keeps_the_rules_of_policies(setting: Setting) -> None:
    """Each action once in microbatch order, within the bounds; a stage waits only if it has to."""
    policies = setting.policies()
    last = len(policies) - 1

    def compare(stage: int, policy: Policy, log: StageLog) -> None:
        assert isinstance(policy, MessageDriven)
        forwards, backwards, weights = log.begun
        assert policy.in_flight == forwards - backwards
        assert policy.deferred == (backwards - weights if setting.is_split else 0)
        # Where a stage has no neighbour, there is nothing to expect or refuse.
        if stage > 0:
            assert policy.expects(FORWARD) == (log.here[FORWARD] < setting.microbatches)
        if stage < last:
            assert policy.expects(BACKWARD) == (log.here[BACKWARD] < setting.microbatches)

    logs = play(policies, setting.microbatches, setting.order, compare)

    for stage, (policy, log) in enumerate(zip(policies, logs, strict=True)):
        assert policy.finished
        for kind in Kind:
            order = [action.microbatch for action in log.actions if action.kind is kind]
            expected = setting.is_split or kind is not Kind.WEIGHT
            assert order == list(range(setting.microbatches if expected else 0))
        bound = setting.bounds[stage]
        for moment in log.moments:
            assert 0 <= moment.in_flight <= bound
            if setting.is_split:
                assert moment.deferred >= 0 and moment.in_flight + moment.deferred <= 2 * bound
            forward, backward, weight = runnable(setting, stage, moment)
            assert (moment.action is not None) == (forward or backward or weight)
            if moment.action is not None and (forward or backward):
                assert moment.action.kind is not Kind.WEIGHT, "weight gradients come last"


@many
@given(SETTINGS)
def test_the_other_kind_runs_where_both_can(setting: Setting) -> None:
    *logs, _ = setting.play()
    for stage, log in enumerate(logs):
        ran: Direction | None = None
        for moment in log.moments:
            if moment.action is None or moment.action.direction is None:
                continue
            if all(runnable(setting, stage, moment)[:2]):
                assert ran is not None, "a backward before any forward"
                assert moment.action.direction is not ran
            ran = moment.action.direction
    # The last stage runs each backward directly after its forward.
    assert replace(setting, is_split=False).play()[-1].actions == [
        Action(kind, microbatch)
        for microbatch in range(setting.microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]


# -- choices by hand ------------------------------------------------------------------------


def middle(bound: int) -> MessageDriven:
    """The middle stage of three, with 4 microbatches, the first split backward of which has run."""
    policy = MessageDriven(stage=1, g_inter=3, microbatches=4, bound=bound, is_split=True)
    policy.arrived(FORWARD, 0)
    assert str(policy.next()) == "F0"
    policy.arrived(BACKWARD, 0)
    assert str(policy.next()) == "B0"
    return policy


def said(policy: Policy, times: int) -> str:
    """The answers of a policy that is asked so often; waits are left out."""
    return to_text(action for action in [policy.next() for _ in range(times)] if action)


@pytest.mark.parametrize(
    ("bound", "forwards", "backwards", "expected"),
    [
        # Weight gradients run when nothing has arrived and after what has.
        (2, 1, 0, "F1 W0"),
        (2, 2, 1, "F1 B1 F2 W0 W1"),
        # Where as many are deferred as may be in flight, they make room by weight gradients.
        (1, 2, 1, "F1 B1 W0 F2 W1"),
    ],
)
def test_weight_gradients_fill_what_arrivals_and_the_bound_leave(
    bound: int, forwards: int, backwards: int, expected: str
) -> None:
    policy = middle(bound)
    for number in range(forwards):
        policy.arrived(FORWARD, 1 + number)
    found = said(policy, 1)
    for number in range(backwards):
        policy.arrived(BACKWARD, 1 + number)

    assert f"{found} {said(policy, 4)}" == expected


MIDDLE: dict[str, Any] = {"stage": 1, "g_inter": 3, "microbatches": 1, "bound": 3}


@pytest.mark.parametrize(
    ("policy", "direction", "microbatch"),
    [
        (MessageDriven(**{**MIDDLE, "stage": 0}), FORWARD, 0),
        (MessageDriven(**{**MIDDLE, "stage": 2}), BACKWARD, 0),
        (MessageDriven(**MIDDLE), FORWARD, 1),
        (MessageDriven(**MIDDLE), BACKWARD, 1),
        (MessageDriven(**{**MIDDLE, "microbatches": 0}), FORWARD, 0),
        (InOrder(forwards(4), stage=1, g_inter=3), BACKWARD, 0),
        (InOrder(forwards(4), stage=1, g_inter=3), FORWARD, 1),
        (InOrder(from_text("F0 B0"), stage=0, g_inter=2), FORWARD, 0),
    ],
)
def test_an_arrival_out_of_order_from_nowhere_or_that_nobody_asked_for_is_an_internal_error(
    policy: Policy, direction: Direction, microbatch: int
) -> None:
    with pytest.raises(AssertionError):
        policy.arrived(direction, microbatch)


# -- actions --------------------------------------------------------------------------------


def test_an_action_reads_as_its_kind_and_microbatch_and_says_where_its_result_travels() -> None:
    assert [str(Action(kind, 12)) for kind in Kind] == ["F12", "B12", "W12"]
    assert to_text(from_text("F0 F1 B0 W0 B1 W1")) == "F0 F1 B0 W0 B1 W1"
    assert [action(kind, 0).direction for kind in Kind] == [FORWARD, BACKWARD, None]
    for kind in (Kind.BACKWARD, Direction.BACKWARD):
        assert action(kind, 3) is action(Kind.BACKWARD, 3)
        assert action(kind, 3).kind is Kind.BACKWARD


def all_1f1b(g_inter: int, microbatches: int, extra_in_flight: int) -> list[list[Action]]:
    return [
        one_forward_one_backward(stage, g_inter, microbatches, extra_in_flight)
        for stage in range(g_inter)
    ]


def play_out(policy: Policy) -> str:
    said = []
    while (action := policy.next()) is not None:
        said.append(action)
    return to_text(said)


# -- the lists ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g_inter", "microbatches", "extra_in_flight", "expected"),
    [
        (
            *(3, 4, 0),
            ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
        ),
        # extra_in_flight deepens the warm-up of all but the last stage.
        (
            *(3, 4, 1),
            ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
        ),
        # Fewer microbatches than stages: it warms up with what there is.
        (4, 2, 0, ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]),
    ],
)
def test_1f1b_warms_up_and_then_takes_turns(
    g_inter: int, microbatches: int, extra_in_flight: int, expected: list[str]
) -> None:
    assert [*map(to_text, all_1f1b(g_inter, microbatches, extra_in_flight))] == expected


# -- the policy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stage", "g_inter", "arrivals", "expected"),
    [
        # The first stage waits for the message of its next action only.
        ("F0 F1 B0 F2 B1 B2", 0, 2, "B0 B1 B2", ["F0 F1", "B0 F2", "B1", "B2"]),
        # A middle stage lets a message lie whose turn has not come.
        ("F0 F1 B0 B1", 1, 3, "F0 B0 F1 B1", ["", "F0", "", "F1 B0", "B1"]),
        # The last stage makes its backwards itself.
        ("F0 B0 F1 B1", 1, 2, "F0 F1", ["", "F0 B0", "F1 B1"]),
    ],
)
def test_a_list_is_played_in_order(
    text: str, stage: int, g_inter: int, arrivals: str, expected: list[str]
) -> None:
    policy = InOrder(from_text(text), stage=stage, g_inter=g_inter)

    said = [play_out(policy)]
    for message in from_text(arrivals):
        assert message.direction is not None
        assert policy.expects(message.direction) and not policy.finished
        policy.arrived(message.direction, message.microbatch)
        said.append(play_out(policy))

    assert said == expected
    assert policy.finished
    assert not policy.expects(FORWARD) and not policy.expects(BACKWARD)


def test_gpipe_runs_all_forwards_first_and_weight_gradients_follow_their_backwards() -> None:
    assert to_text(gpipe(3)) == "F0 F1 F2 B0 B1 B2"
    assert to_text(with_weights(from_text("F0 F1 B0 B1"))) == "F0 F1 B0 W0 B1 W1"
