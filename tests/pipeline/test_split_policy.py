"""The policy of split backwards: its rules under any arrival order, and its choices by hand."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.action_text import to_text

from axsparse.pipeline.actions import Action, Kind
from axsparse.pipeline.policy import UNKNOWN, Forecast, Preference
from axsparse.pipeline.split_policy import Bounds, MessageDrivenSplit, most_deferred_waiting
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
many = settings(deadline=None, derandomize=True, max_examples=150)


@dataclass(frozen=True)
class Setting:
    """A pipeline, the bounds of its stages, and the seed of arrivals and forecasts."""

    microbatches: int
    bounds: list[Bounds]
    prefer: Preference
    order: int


SETTINGS = st.builds(
    Setting,
    microbatches=st.integers(1, 12),
    bounds=st.lists(
        st.builds(
            lambda in_flight, more, size: Bounds(in_flight, max(1.0, size) + more, size),
            st.integers(1, 7),
            st.integers(0, 20).map(lambda number: number / 4),
            st.sampled_from((0.25, 0.5, 1.0, 1.5, 4.0)),
        ),
        min_size=1,
        max_size=5,
    ),
    prefer=st.sampled_from(("alternate", "backward", "forward")),
    order=st.integers(0, 2**32),
)


def play(setting: Setting, *, with_forecasts: bool) -> list[list[Action]]:
    """Run a pipeline to its end; at each point, chance picks the stage or link that moves.

    Stages are asked again and again, as by an engine. A forecast may say anything for a while.
    """
    chance = random.Random(setting.order)  # noqa: S311 - an arrival order
    stages = len(setting.bounds)
    policies = [
        MessageDrivenSplit(
            stage=stage,
            g_inter=stages,
            microbatches=setting.microbatches,
            bounds=bounds,
            prefer=setting.prefer,
        )
        for stage, bounds in enumerate(setting.bounds)
    ]
    done: list[list[Action]] = [[] for _ in policies]
    links: dict[tuple[int, Direction], list[int]] = {}
    useless = 0
    while not all(policy.finished for policy in policies):
        moves = [key for key, queue in links.items() if queue]
        stage = chance.randrange(stages + len(moves))
        if stage >= stages:
            target, direction = moves[stage - stages]
            policies[target].arrived(direction, links[target, direction].pop(0))
            continue
        waits = (chance.choice((0.0, 0.4, 0.6, math.inf)) for _ in Direction)
        action = policies[stage].next(Forecast(*waits) if with_forecasts else UNKNOWN)
        if action is None:
            useless += 1
            assert useless < 10_000, "the run does not end"
            continue
        done[stage].append(action)
        target = stage + (1 if action.kind is Kind.FORWARD else -1)
        if action.direction is not None and 0 <= target < stages:
            links.setdefault((target, action.direction), []).append(action.microbatch)
    assert not any(links.values()), "a message that nobody took"
    return done


@many
@given(SETTINGS, st.booleans())
def test_every_run_ends_with_each_action_done_once_in_microbatch_order(
    setting: Setting, with_forecasts: bool
) -> None:
    for actions in play(setting, with_forecasts=with_forecasts):
        for kind in Kind:
            numbers = [action.microbatch for action in actions if action.kind is kind]
            assert numbers == list(range(setting.microbatches))


@many
@given(SETTINGS, st.booleans())
def test_no_stage_ever_exceeds_its_bounds_or_makes_weight_gradients_before_the_backward(
    setting: Setting, with_forecasts: bool
) -> None:
    done = play(setting, with_forecasts=with_forecasts)

    for bounds, actions in zip(setting.bounds, done, strict=True):
        seen: Counter[Kind] = Counter()
        for action in actions:
            seen[action.kind] += 1
            in_flight = seen[Kind.FORWARD] - seen[Kind.BACKWARD]
            deferred = seen[Kind.BACKWARD] - seen[Kind.WEIGHT]
            assert 0 <= in_flight <= bounds.in_flight
            assert deferred >= 0
            assert in_flight + bounds.deferred_size * deferred <= bounds.held


def middle(bounds: Bounds, patience: float = 0.5) -> MessageDrivenSplit:
    """The middle stage of three, with 4 microbatches, the first backward of which has run."""
    policy = MessageDrivenSplit(
        stage=1, g_inter=3, microbatches=4, bounds=bounds, patience=patience
    )
    policy.arrived(FORWARD, 0)
    assert str(policy.next()) == "F0"
    policy.arrived(BACKWARD, 0)
    assert str(policy.next()) == "B0"
    return policy


def test_weight_gradients_run_when_nothing_has_arrived_and_after_what_has() -> None:
    policy = middle(Bounds(2, 3))
    policy.arrived(FORWARD, 1)

    said = [policy.next(), policy.next(), policy.next()]

    assert to_text(action for action in said if action) == "F1 W0"
    assert said[2] is None


@pytest.mark.parametrize(
    ("forecast", "patience", "expected"),
    [
        (UNKNOWN, 0.5, "W0"),
        (Forecast(0.4, math.inf), 0.5, "None"),
        (Forecast(math.inf, 0.4), 0.5, "None"),
        (Forecast(0.5, 0.6), 0.5, "W0"),
        (Forecast(0.9, 9.0), 1.0, "None"),
        (Forecast(0.0, 0.0), 0.0, "W0"),
    ],
)
def test_an_announced_message_is_waited_for_if_it_is_near(
    forecast: Forecast, patience: float, expected: str
) -> None:
    assert str(middle(Bounds(2, 3), patience).next(forecast)) == expected


@pytest.mark.parametrize(
    ("stage", "bounds", "expected"),
    [
        (0, Bounds(4, 4), 0),
        (2, Bounds(2, 4), 2),
        (3, Bounds(1, 5), 3),
        (3, Bounds(1, 6), 4),
        (1, Bounds(5, 8), 4),
        (1, Bounds(3, 8, 4.0), 1),
        (1, Bounds(3, 8, 0.25), 4),
        (1, Bounds(3, 4.5), 1),
    ],
)
def test_a_stage_waits_while_no_more_is_deferred_than_the_end_of_the_step_has_room_for(
    stage: int, bounds: Bounds, expected: int
) -> None:
    assert most_deferred_waiting(stage, 4, bounds) == expected


def test_a_stage_that_has_deferred_more_waits_for_nothing() -> None:
    policy = middle(Bounds(2, 3))
    near = Forecast(forward=0.1)
    assert policy.next(near) is None
    policy.arrived(FORWARD, 1)
    policy.arrived(BACKWARD, 1)

    said = [policy.next(), policy.next()]

    assert to_text(action for action in said if action) == "F1 B1"
    assert policy.deferred == 2
    assert str(policy.next(near)) == "W0"
    assert policy.next(near) is None


def test_a_message_is_not_waited_for_if_bounds_would_not_let_its_action_run() -> None:
    # With one held, F1 cannot run before W0; with room for one large deferred one, B1 cannot.
    assert str(middle(Bounds(1, 1)).next(Forecast(forward=0.1))) == "W0"
    policy = MessageDrivenSplit(stage=1, g_inter=3, microbatches=4, bounds=Bounds(2, 5, 4.0))
    for number in range(2):
        policy.arrived(FORWARD, number)
    said = [policy.next()]
    policy.arrived(BACKWARD, 0)
    said += [policy.next(), policy.next()]

    assert to_text(action for action in said if action) == "F0 B0 F1"
    assert str(policy.next(Forecast(backward=0.1))) == "W0"


def test_a_full_stage_makes_room_by_weight_gradients() -> None:
    policy = middle(Bounds(1, 1))
    policy.arrived(FORWARD, 1)

    said = [policy.next(), policy.next()]

    assert to_text(action for action in said if action) == "W0 F1"
    assert (policy.in_flight, policy.deferred) == (1, 0)


@pytest.mark.parametrize("bounds", [(0, 1.0, 1.0), (1, 0.9, 0.5), (1, 3.0, 4.0), (1, 1.0, 0.0)])
def test_bounds_under_which_nothing_could_run_are_refused(
    bounds: tuple[int, float, float],
) -> None:
    with pytest.raises(ValueError, match="at least 1, deferred_size above 0 and held at least"):
        Bounds(*bounds)


def test_small_deferred_microbatches_leave_room_for_forwards() -> None:
    policy = middle(Bounds(2, 2, 0.25))
    policy.arrived(FORWARD, 1)
    policy.arrived(FORWARD, 2)

    # In flight 1 + 1 and deferred ¼ would be above 2.
    said = [policy.next() for _ in range(3)]

    assert to_text(action for action in said if action) == "F1 W0 F2"


@pytest.mark.parametrize("wrong", [(FORWARD, 1), (BACKWARD, 1), (FORWARD, -1)])
def test_an_arrival_out_of_order_is_an_internal_error(wrong: tuple[Direction, int]) -> None:
    policy = MessageDrivenSplit(stage=1, g_inter=3, microbatches=4, bounds=Bounds(2, 3))

    with pytest.raises(AssertionError):
        policy.arrived(*wrong)
