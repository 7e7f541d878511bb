"""Simulated steps: against eq. (6), against examples by hand, and under any delays."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.action_text import from_text, to_text, uniform_durations

from axsparse.pipeline.policy import Action, InOrder, Kind, Schedule, ScheduleName
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
NAMES: tuple[ScheduleName, ...] = ("message-driven", "1f1b", "gpipe")
SCHEDULES = [Schedule(name, extra_in_flight) for name in NAMES for extra_in_flight in (0, 1, 3)]
SPLIT = [
    Schedule(name, extra_in_flight, split_backward=True)
    for name in get_args(ScheduleName)
    for extra_in_flight in (0, 1, 3)
]


def run(
    schedule: Schedule, durations: Durations, edges: list[MessageCost] | None = None
) -> PipelineRun:
    g_inter, microbatches = len(durations.forward), len(durations.forward[0])
    return simulate(
        lambda stage: schedule.policy(stage=stage, g_inter=g_inter, microbatches=microbatches),
        durations,
        edges or [MessageCost()] * (g_inter - 1),
    )


def lists(
    *stages: str, durations: Durations, edges: list[MessageCost] | None = None
) -> PipelineRun:
    return simulate(
        lambda stage: InOrder(from_text(stages[stage]), stage=stage, g_inter=len(stages)),
        durations,
        edges or [MessageCost()] * (len(stages) - 1),
    )


def idle(result: PipelineRun, stage: int) -> float:
    """The bubble of a stage: the step without its compute and messages."""
    return result.seconds - result.stages[stage].compute - result.stages[stage].p2p


# -- exact cases ----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 2)])
def test_a_uniform_pipeline_with_free_messages_has_the_bubble_of_equation_6(
    schedule: Schedule, forward: int, backward: int
) -> None:
    for g_inter, microbatches in itertools.product([1, 3, 8], [1, 5, 16]):
        result = run(schedule, uniform_durations(g_inter, microbatches, forward, backward))

        bubble = (g_inter - 1) * (forward + backward)
        assert result.seconds == microbatches * (forward + backward) + bubble
        assert [idle(result, stage) for stage in range(g_inter)] == [bubble] * g_inter


def test_a_message_takes_its_latency_and_the_time_of_both_ends() -> None:
    # F0 0-1, handled until 3, arrives at 7, handled until 9, F0 9-10, B0 10-12,
    # handled until 14, arrives at 18, handled until 20, B0 20-22.
    result = lists(
        "F0 B0",
        "F0 B0",
        durations=uniform_durations(2, 1, 1, 2),
        edges=[MessageCost(latency=4, handling=2)],
    )

    first, last = result.stages
    assert (first.begins, last.begins) == ([0, 20], [9, 10])
    assert (first.p2p, last.p2p) == (4, 4)
    assert (first.end, last.end, result.seconds) == (22, 14, 22)
    assert idle(result, 0) == 22 - 3 - 4


def test_lists_that_wait_for_each_other_end_the_simulation() -> None:
    with pytest.raises(RuntimeError, match=r"a deadlock: stages \[0, 1\] wait for ever"):
        lists("F0 B0 F1 B1", "F0 F1 B0 B1", durations=uniform_durations(2, 2, 1, 1))


# -- split backwards ------------------------------------------------------------------------


def test_weight_gradients_take_their_time_and_send_nothing() -> None:
    # stage 0: F0 0-1, F1 1-2,        B0 6-9,  W0 9-13 (no message), B1 13-16, W1 16-20
    # stage 1:         F0 1-3, B0 3-6, F1 6-8, B1 8-11, W0 11-15, W1 15-19
    durations = Durations([[1, 1], [2, 2]], [[3, 3], [3, 3]], [[4, 4], [4, 4]])

    schedule = Schedule("message-driven", 0, split_backward=True)
    first, last = run(schedule, durations).stages

    assert (to_text(first.actions), first.begins) == ("F0 F1 B0 W0 B1 W1", [0, 1, 6, 9, 13, 16])
    assert (to_text(last.actions), last.begins) == ("F0 B0 F1 B1 W0 W1", [1, 3, 6, 8, 11, 15])
    assert (first.compute, first.end, last.end) == (16, 20, 19)


# -- any delays -----------------------------------------------------------------------------


Case = tuple[Schedule, Durations, list[MessageCost]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    g_inter, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    # Eighths are exact in floating point, so that sums can be compared without a tolerance.
    eighths = st.integers(0, 80).map(lambda number: number / 8)
    lengths = eighths.filter(bool)
    rows = st.lists(
        st.lists(lengths, min_size=microbatches, max_size=microbatches),
        min_size=g_inter,
        max_size=g_inter,
    )
    edges = st.lists(
        st.builds(MessageCost, eighths, eighths), min_size=g_inter - 1, max_size=g_inter - 1
    )
    schedule = draw(st.sampled_from(SCHEDULES + SPLIT))
    weight = draw(rows) if schedule.split_backward else ()
    return schedule, Durations(draw(rows), draw(rows), weight), draw(edges)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(cases())
def test_nothing_runs_before_its_message_can_have_arrived(case: Case) -> None:
    schedule, durations, edges = case

    result = run(schedule, durations, edges)

    begin = [dict(zip(done.actions, done.begins, strict=True)) for done in result.stages]
    end = [
        {action: at + durations.of(stage, action) for action, at in each.items()}
        for stage, each in enumerate(begin)
    ]
    last = len(edges)
    for number in range(len(durations.forward[0])):
        forward, backward = Action(Kind.FORWARD, number), Action(Kind.BACKWARD, number)
        assert begin[last][backward] >= end[last][forward]
        for stage, edge in enumerate(edges):
            way = edge.latency + 2 * edge.handling
            assert begin[stage + 1][forward] >= end[stage][forward] + way
            assert begin[stage][backward] >= end[stage + 1][backward] + way


def test_each_edge_has_its_own_costs() -> None:
    durations = uniform_durations(3, 1, 1, 1)

    result = lists(
        "F0 B0", "F0 B0", "F0 B0", durations=durations, edges=[MessageCost(10), MessageCost(100)]
    )

    assert [stage.begins for stage in result.stages] == [[0, 225], [11, 214], [112, 113]]


def test_what_arrives_at_the_instant_of_a_decision_counts() -> None:
    # At 3, stage 0 ends F2 and B0 arrives.
    durations = Durations(forward=[[1] * 5, [1] * 5], backward=[[1] * 5, [1] * 5])

    result = run(Schedule("message-driven", 3), durations)

    assert to_text(result.stages[0].actions).startswith("F0 F1 F2 B0")
