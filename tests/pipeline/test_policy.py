"""The policy under any arrival order: all stages of a pipeline played against each other."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.pipeline.actions import Action, Kind
from axsparse.pipeline.policy import ForwardOnly, MessageDriven, Policy, Preference
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
PREFERENCES: tuple[Preference, ...] = ("alternate", "backward", "forward")


@dataclass(frozen=True)
class Setting:
    """A pipeline, and the seed from which its arrival order is drawn."""

    g_inter: int
    microbatches: int
    slack: int
    prefer: Preference
    order: int

    def policies(self) -> list[MessageDriven]:
        return [
            MessageDriven(
                stage=stage,
                g_inter=self.g_inter,
                microbatches=self.microbatches,
                slack=self.slack,
                prefer=self.prefer,
            )
            for stage in range(self.g_inter)
        ]


SETTINGS = st.builds(
    Setting,
    g_inter=st.integers(1, 6),
    microbatches=st.integers(1, 20),
    slack=st.integers(0, 4),
    prefer=st.sampled_from(PREFERENCES),
    order=st.integers(0, 2**32),
)
Counts = dict[Direction, int]


@dataclass(frozen=True)
class Moment:
    """What could run on a stage, and what its policy said (None: wait)."""

    action: Action | None
    arrived: Counts
    begun: Counts


@dataclass
class StageLog:
    """What one stage was told and what it said, kept apart from the policy's own counts."""

    arrived: Counts
    begun: Counts = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})
    moments: list[Moment] = field(default_factory=list)

    def note(self, action: Action | None) -> None:
        self.moments.append(Moment(action, dict(self.arrived), dict(self.begun)))
        if action is not None:
            self.begun[Direction(action.kind)] += 1

    @property
    def actions(self) -> list[Action]:
        return [moment.action for moment in self.moments if moment.action is not None]


def play(
    policies: list[MessageDriven] | list[ForwardOnly],
    microbatches: int,
    order: int,
    before_each: Callable[[int, Policy, StageLog], None] = lambda stage, policy, log: None,
) -> list[StageLog]:
    """Run a pipeline to its end; at each point, chance picks the stage or link that moves.

    Links deliver first-in-first-out; nothing else is promised.
    """
    chance = random.Random(order)  # noqa: S311 - an arrival order
    last = len(policies) - 1
    logs = [
        StageLog({FORWARD: microbatches if stage == 0 else 0, BACKWARD: 0})
        for stage in range(len(policies))
    ]
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
            logs[stage].arrived[direction] += 1
            resting.discard(stage)
            continue
        before_each(move, policies[move], logs[move])
        action = policies[move].next()
        logs[move].note(action)
        # One moment an action and one a wait, and each wait ends with an arrival.
        assert len(logs[move].moments) <= 4 * microbatches + 1, "the run does not end"
        if action is None:
            resting.add(move)
        elif action.direction is FORWARD and move < last:
            links[move + 1, FORWARD].append(action.microbatch)
        elif action.direction is BACKWARD and move > 0:
            links[move - 1, BACKWARD].append(action.microbatch)
        elif action.direction is FORWARD:
            logs[move].arrived[BACKWARD] += 1  # the loss is the last stage's own


def runnable(setting: Setting, stage: int, moment: Moment) -> tuple[bool, bool]:
    """Whether a forward and whether a backward could have been run at a moment."""
    in_flight = moment.begun[FORWARD] - moment.begun[BACKWARD]
    below_bound = in_flight < setting.g_inter - stage + setting.slack
    forward = moment.begun[FORWARD] < moment.arrived[FORWARD] and below_bound
    return forward, moment.begun[BACKWARD] < moment.arrived[BACKWARD]


many = settings(deadline=None, derandomize=True, max_examples=150)


@many
@given(SETTINGS)
def test_every_run_ends_with_each_forward_and_backward_done_once_in_microbatch_order(
    setting: Setting,
) -> None:
    policies = setting.policies()

    logs = play(policies, setting.microbatches, setting.order)

    for policy, log in zip(policies, logs, strict=True):
        assert policy.finished
        for direction in Direction:
            order = [a.microbatch for a in log.actions if a.direction is direction]
            assert order == list(range(setting.microbatches))


@many
@given(SETTINGS)
def test_no_stage_ever_holds_more_activations_than_its_bound(setting: Setting) -> None:
    logs = play(setting.policies(), setting.microbatches, setting.order)

    for stage, log in enumerate(logs):
        held = most = 0
        for action in log.actions:
            held += 1 if action.direction is FORWARD else -1
            most = max(most, held)
        assert most <= setting.g_inter - stage + setting.slack


@many
@given(SETTINGS)
def test_in_flight_counts_the_forwards_without_their_backward(setting: Setting) -> None:
    def compare(stage: int, policy: Policy, log: StageLog) -> None:
        assert isinstance(policy, MessageDriven)
        assert policy.in_flight == log.begun[FORWARD] - log.begun[BACKWARD]

    play(setting.policies(), setting.microbatches, setting.order, compare)


@many
@given(SETTINGS)
def test_a_stage_waits_only_when_nothing_can_run(setting: Setting) -> None:
    logs = play(setting.policies(), setting.microbatches, setting.order)

    for stage, log in enumerate(logs):
        for moment in log.moments:
            assert (moment.action is not None) == any(runnable(setting, stage, moment))


@many
@given(SETTINGS)
def test_the_preference_decides_where_both_kinds_can_run(setting: Setting) -> None:
    logs = play(setting.policies(), setting.microbatches, setting.order)

    for stage, log in enumerate(logs[:-1]):
        ran: Direction | None = None
        for moment in log.moments:
            if moment.action is None:
                continue
            if all(runnable(setting, stage, moment)):
                assert ran is not None, "a backward before any forward"
                other = BACKWARD if ran is FORWARD else FORWARD
                wanted = {"alternate": other, "backward": BACKWARD, "forward": FORWARD}
                assert moment.action.direction is wanted[setting.prefer]
            ran = moment.action.direction


@many
@given(SETTINGS)
def test_the_last_stage_runs_each_backward_directly_after_its_forward(setting: Setting) -> None:
    logs = play(setting.policies(), setting.microbatches, setting.order)

    assert logs[-1].actions == [
        Action(kind, microbatch)
        for microbatch in range(setting.microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]


@many
@given(SETTINGS)
def test_a_run_expects_as_many_messages_as_it_has_microbatches(setting: Setting) -> None:
    last = setting.g_inter - 1

    def compare(stage: int, policy: Policy, log: StageLog) -> None:
        # Where a stage has no neighbour, there is nothing to expect or refuse.
        if stage > 0:
            assert policy.expects(FORWARD) == (log.arrived[FORWARD] < setting.microbatches)
        if stage < last:
            assert policy.expects(BACKWARD) == (log.arrived[BACKWARD] < setting.microbatches)

    play(setting.policies(), setting.microbatches, setting.order, compare)


def test_alternation_with_both_kinds_at_hand_reads_f_f_b_f_b() -> None:
    policy = MessageDriven(stage=0, g_inter=2, microbatches=4, slack=2)
    said = [str(policy.next()), str(policy.next())]
    policy.arrived(BACKWARD, 0)
    policy.arrived(BACKWARD, 1)

    said += [str(policy.next()) for _ in range(4)]

    assert said == ["F0", "F1", "B0", "F2", "B1", "F3"]


def test_a_finished_run_has_nothing_more_to_do() -> None:
    policy = MessageDriven(stage=0, g_inter=1, microbatches=1, slack=0)

    said = [policy.finished, policy.next(), policy.finished, policy.next(), policy.finished]

    assert said == [False, Action(Kind.FORWARD, 0), False, Action(Kind.BACKWARD, 0), True]
    assert policy.next() is None


@pytest.mark.parametrize(
    ("stage", "direction", "microbatch"),
    [(0, FORWARD, 0), (2, BACKWARD, 0), (1, FORWARD, 1), (1, BACKWARD, 1)],
)
def test_an_arrival_out_of_order_or_from_nowhere_is_an_internal_error(
    stage: int, direction: Direction, microbatch: int
) -> None:
    policy = MessageDriven(stage=stage, g_inter=3, microbatches=4, slack=0)

    with pytest.raises(AssertionError):
        policy.arrived(direction, microbatch)


def test_an_arrival_beyond_the_last_microbatch_is_an_internal_error() -> None:
    policy = MessageDriven(stage=1, g_inter=2, microbatches=1, slack=0)
    policy.arrived(FORWARD, 0)

    with pytest.raises(AssertionError, match="never asked"):
        policy.arrived(FORWARD, 1)


@many
@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 2**32))
def test_an_evaluation_runs_every_forward_once_in_order(
    g_inter: int, microbatches: int, order: int
) -> None:
    policies = [ForwardOnly(stage=stage, microbatches=microbatches) for stage in range(g_inter)]

    def compare(stage: int, policy: Policy, log: StageLog) -> None:
        assert not policy.expects(BACKWARD)
        assert policy.expects(FORWARD) == (log.arrived[FORWARD] < microbatches)
        assert policy.finished == (log.begun[FORWARD] == microbatches)

    logs = play(policies, microbatches, order, compare)

    for log in logs:
        assert log.actions == [
            Action(Kind.FORWARD, microbatch) for microbatch in range(microbatches)
        ]


@pytest.mark.parametrize(("direction", "microbatch"), [(BACKWARD, 0), (FORWARD, 1)])
def test_an_evaluation_takes_forwards_in_order_only(direction: Direction, microbatch: int) -> None:
    policy = ForwardOnly(stage=1, microbatches=4)

    with pytest.raises(AssertionError):
        policy.arrived(direction, microbatch)


def test_the_policy_needs_neither_torch_nor_mpi() -> None:
    script = (
        "import sys; import axsparse.pipeline.policy; "
        "print([name for name in ('torch', 'mpi4py', 'numpy') if name in sys.modules])"
    )

    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (shown.stdout, shown.stderr) == ("[]\n", "")
