"""What the planner is told of a configured run, and what it predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.planner_cases import cluster
from support.runs import tiny_config, tiny_gpt

from axsparse.config.schema import Config
from axsparse.models.survey import survey
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.split_policy import GREEDY, PATIENCE
from axsparse.planner.cluster import Cluster
from axsparse.planner.run_workload import (
    backwards,
    configured_schedule,
    copied_bytes,
    only_backward,
    predict,
    run_question,
    schedules,
    with_announcements,
    workload,
)
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW

MACHINE = cluster(overhead_bytes=0.0, jitter=0.0)


def subject(config: Config) -> SurveyedModel:
    return workload(config, survey(tiny_gpt(config)), "tiny", {}, ADAMW)


@pytest.mark.parametrize(
    "pipeline", [{"slack": 3}, {"slack": 3, "prefer": "backward"}, {"schedule": "1f1b", "slack": 3}]
)
def test_a_slack_that_is_given_is_kept(pipeline: dict[str, Any]) -> None:
    found = schedules(tiny_config(pipeline=pipeline), has_times=True)

    name, prefer = pipeline.get("schedule", "message-driven"), pipeline.get("prefer", "alternate")
    whole = Schedule(name, 3, prefer)
    split = replace(whole, split_backward=True)
    assert found == ([whole] if whole.name == "1f1b" else [split, whole])


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({}, [True, False]),
        ({"compile": True}, [False]),
        ({"schedule": "gpipe"}, [False]),
        ({"schedule": "zb-h1"}, [True]),
        ({"schedule": "gpipe", "split_backward": True}, [True]),
        ({"split_backward": False}, [False]),
    ],
)
def test_which_backwards_a_configuration_allows(
    pipeline: dict[str, Any], expected: list[bool]
) -> None:
    found = tiny_config(pipeline=pipeline).pipeline

    assert backwards(found) == expected
    assert only_backward(found) == (None if len(expected) == 2 else expected[0])


def test_bounds_of_a_configuration_are_those_of_its_schedule() -> None:
    pipeline = {"slack": 2, "split_backward": True, "held": 9.5}

    found = configured_schedule(tiny_config(pipeline=pipeline).pipeline)

    assert found == Schedule("message-driven", 2, "alternate", split_backward=True, held=9.5)


@pytest.mark.parametrize(
    ("announce", "on_host", "expected"),
    [(True, True, PATIENCE), (True, False, GREEDY), (False, True, GREEDY)],
)
def test_stages_wait_for_messages_only_where_these_are_announced(
    announce: bool, on_host: bool, expected: float
) -> None:
    config = with_announcements(tiny_config(pipeline={"announce": announce}), on_host=on_host)
    asked = run_question(subject(config), MACHINE, config, 2, [2], 1e9)

    [schedule, *_] = schedules(config, has_times=False)
    assert schedule is not None
    assert {schedule.patience} | {each.patience for each in asked.schedules} == {expected}


@pytest.mark.parametrize(
    ("announce", "expected"),
    [
        (True, [(1, True), (1, False), (0, True), (0, False)]),
        (False, [(1, True), (1, False), (0, False)]),
    ],
)
def test_backwards_are_split_without_slack_where_messages_are_announced(
    announce: bool, expected: list[tuple[int, bool]]
) -> None:
    found = schedules(tiny_config(pipeline={"announce": announce}), has_times=False)
    pipeline = {"announce": announce, "slack": 0, "split_backward": True}
    asked = schedules(tiny_config(pipeline=pipeline), has_times=True)

    assert [(each.slack, each.split_backward) for each in found if each is not None] == expected
    assert [each is not None and each.split_backward for each in asked] == [True]


def test_other_schedules_go_without_a_search() -> None:
    found = schedules(tiny_config(pipeline={"schedule": "1f1b"}), has_times=True)

    assert [each and each.slack for each in found] == [1, 0]


@pytest.mark.parametrize("machine", [None, MACHINE])
def test_a_prediction_has_times_only_with_a_cluster(machine: Cluster | None) -> None:
    config = tiny_config()
    found = predict(subject(config), machine, config, Grid(2, 2), 1, "because")
    other = predict(subject(config), MACHINE, config, Grid(2, 2), 1, None)

    assert (found.step_seconds is None) == (machine is None)
    assert found.memory_bytes == other.memory_bytes > 0
    assert found.reason == "because"


@pytest.mark.parametrize(("every", "expected"), [(0, 0), (5, 2e9), (19, 2e9), (20, 0)])
def test_a_checkpoint_takes_memory_of_training_unless_it_is_the_last(
    every: int, expected: float
) -> None:
    config = tiny_config(train={"steps": 20}, checkpoint={"every": every, "buffer": 2.0})

    assert copied_bytes(config) == expected
    assert subject(config).checkpoint_buffer == expected
    elsewhere = workload(config, survey(tiny_gpt(config)), "tiny", {}, ADAMW, on_host=False)
    assert elsewhere.checkpoint_buffer == 0


@pytest.mark.parametrize("machine", [None, MACHINE])
def test_what_is_predicted_is_the_peak_before_the_first_checkpoint(machine: Cluster | None) -> None:
    last, often = (
        tiny_config(train={"steps": 20}, checkpoint={"every": every}) for every in (20, 1)
    )
    peaks = {
        predict(subject(config), machine, config, Grid(2, 2), 1, None).memory_bytes
        for config in (last, often)
    }

    assert len(peaks) == 1
