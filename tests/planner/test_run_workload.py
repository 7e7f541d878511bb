"""What the planner is told of a configured run, and what it predicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.planner_cases import cluster
from support.runs import tiny_config, tiny_gpt

from axsparse.config.schema import Config
from axsparse.models.survey import survey
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster
from axsparse.planner.run_workload import (
    configured_schedule,
    copied_bytes,
    only_backward,
    predict,
    schedules,
    split_trade,
    workload,
)
from axsparse.planner.schedule_choice import Trade
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
    assert found == [Schedule(name, 3, prefer)]


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({}, None),
        ({"compile": True}, False),
        ({"schedule": "gpipe"}, False),
        ({"schedule": "gpipe", "split_backward": True}, True),
        ({"split_backward": False}, False),
    ],
)
def test_which_backwards_a_configuration_allows(
    pipeline: dict[str, Any], expected: bool | None
) -> None:
    assert only_backward(tiny_config(pipeline=pipeline).pipeline) is expected


def test_bounds_of_a_configuration_are_those_of_its_schedule() -> None:
    pipeline = {"slack": 2, "split_backward": True, "held": 9.5}

    found = configured_schedule(tiny_config(pipeline=pipeline).pipeline)

    assert found == Schedule("message-driven", 2, "alternate", split_backward=True, held=9.5)


@pytest.mark.parametrize(("split", "expected"), [("auto", False), (True, True)])
def test_without_times_two_slacks_are_tried_and_backwards_split_only_where_asked(
    split: bool | str, expected: bool
) -> None:
    found = schedules(tiny_config(pipeline={"split_backward": split}), has_times=False)

    assert [(each and each.slack, each and each.split_backward) for each in found] == [
        (1, expected),
        (0, expected),
    ]


# -- what split backwards cost and bring ----------------------------------------------------


def split_of(room: float = math.inf, microbatches: int = 12, **pipeline: Any) -> Trade | None:
    batch = {"global_batch_size": microbatches, "microbatch_size": 1}
    config = tiny_config(pipeline=pipeline, batch=batch)
    return split_trade(subject(config), None, config, Grid(2, 1), 1, room)


def test_splitting_takes_memory_and_saves_a_part_of_the_bubble() -> None:
    found = split_of()

    assert found is not None and found.fits
    assert found.memory >= 0
    # Two stages have a bubble of a thirteenth; a third of the work can fill it.
    assert -1 / 13 < found.seconds < 0
    more = split_of(microbatches=48)
    assert more is not None and found.seconds < more.seconds < 0


def test_what_would_fill_a_machine_is_not_taken() -> None:
    found = split_of(room=1e3)

    assert found is not None and not found.is_taken
    assert str(found).endswith("not taken, as more than 85 % of the memory would be full")


@pytest.mark.parametrize(
    "given", [{"microbatches": 1}, {"split_backward": True}, {"schedule": "1f1b"}]
)
def test_where_nothing_is_left_to_decide_nothing_is_said(given: dict[str, Any]) -> None:
    assert split_of(**given) is None


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
