"""GPipe and 1F1B as lists of actions, the policy that plays a list, and the dry run."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.action_text import dry_run, from_text, to_text

from axsparse.pipeline.policy import Action, InOrder, MessageDriven, Policy
from axsparse.pipeline.schedules import (
    Schedule,
    ScheduleName,
    gpipe,
    one_forward_one_backward,
    with_weights,
)
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
many = settings(deadline=None, derandomize=True, max_examples=150)
sizes = {"g_inter": st.integers(1, 7), "microbatches": st.integers(1, 20)}


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


@many
@given(**sizes, extra_in_flight=st.integers(0, 5))
def test_lists_never_wait_for_ever_and_fill_their_bounds(
    g_inter: int, microbatches: int, extra_in_flight: int
) -> None:
    most = dry_run(all_1f1b(g_inter, microbatches, extra_in_flight))

    bounds = [g_inter - stage + extra_in_flight for stage in range(g_inter - 1)]
    assert most == [min(microbatches, bound) for bound in bounds] + [1]
    assert dry_run([gpipe(microbatches)] * g_inter) == [microbatches] * g_inter


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_every_schedule_has_weight_gradients_if_backwards_are_split(name: ScheduleName) -> None:
    policy = Schedule(name, 1, "alternate", split_backward=True).policy(
        stage=0, g_inter=1, microbatches=2
    )

    text = play_out(policy)

    assert policy.finished
    assert sorted(text.split()) == ["B0", "B1", "F0", "F1", "W0", "W1"]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_stage_holds_as_many_as_there_are_stages_from_it_on_and_slack(is_split: bool) -> None:
    schedule = Schedule("message-driven", 1, "alternate", split_backward=is_split)

    assert [schedule.bound(stage, 4) for stage in range(4)] == [5, 4, 3, 2]


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


# -- the choice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule("1f1b", 1, "alternate"), "F0 F1 F2"),
        (Schedule("gpipe", 1, "alternate"), "F0 F1 F2 F3"),
    ],
)
def test_a_schedule_by_name_is_its_list(schedule: Schedule, expected: str) -> None:
    policy = schedule.policy(stage=0, g_inter=2, microbatches=4)

    assert isinstance(policy, InOrder)
    # 1F1B holds 2 − 0 + 1 forwards, GPipe all.
    assert play_out(policy) == expected


def test_gpipe_runs_all_forwards_first_and_weight_gradients_follow_their_backwards() -> None:
    assert to_text(gpipe(3)) == "F0 F1 F2 B0 B1 B2"
    assert to_text(with_weights(from_text("F0 F1 B0 B1"))) == "F0 F1 B0 W0 B1 W1"
    # What a list holds counts until the weight gradients have run.
    assert dry_run([from_text("F0 B0 F1 B1 W0 W1")]) == [2]
    assert dry_run([from_text("F0 B0 W0 F1 B1 W1")]) == [1]


def test_the_message_driven_schedule_passes_its_slack_and_preference_on() -> None:
    policy = Schedule("message-driven", 1, "forward").policy(stage=0, g_inter=2, microbatches=9)
    said = [policy.next() for _ in range(2)]
    policy.arrived(BACKWARD, 0)
    said += [policy.next() for _ in range(2)]

    assert isinstance(policy, MessageDriven)
    assert to_text(action for action in said if action) == "F0 F1 F2 B0"
