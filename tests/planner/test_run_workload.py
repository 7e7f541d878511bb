"""The layout that `auto` takes, and what is predicted of one."""

from __future__ import annotations

from typing import Any

import pytest
from support.planner_cases import cluster
from support.runs import tiny_config, tiny_gpt

from axsparse.config.schema import Config
from axsparse.models.survey import survey
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster
from axsparse.planner.layout_search import Rejection
from axsparse.planner.run_workload import (
    Choice,
    choose_layout,
    copied_bytes,
    predict,
    schedules,
    workload,
)
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW

MACHINE = cluster(overhead_bytes=0.0, jitter=0.0)


def subject(config: Config) -> SurveyedModel:
    return workload(config, survey(tiny_gpt(config)), "tiny", {}, ADAMW)


def chosen(room: float, *, has_times: bool = False, **sections: Any) -> Choice | Rejection:
    config = tiny_config(**sections)
    return choose_layout(subject(config), MACHINE, config, 4, [1, 2, 4], room, has_times=has_times)


def test_the_fewest_stages_that_fit_are_taken_and_it_is_said_why() -> None:
    roomy = chosen(1e9)
    assert isinstance(roomy, Choice)
    whole = max(stage.total for stage in roomy.row.memory)
    tight = chosen(0.8 * whole)
    assert isinstance(tight, Choice)

    assert (roomy.row.grid, tight.row.grid) == (Grid(1, 4), Grid(2, 2))
    assert roomy.reason == "fits 1.0 GB a rank"
    assert tight.reason.startswith("the fewest that fit ")
    assert "(with 1, stage 0 needs " in tight.reason


def test_where_nothing_fits_the_last_is_given_back_with_its_reason() -> None:
    found = chosen(1e3)

    assert isinstance(found, Rejection)
    assert found.g_inter == 4
    assert " GB of 0.0000" in found.reason


def test_slack_falls_to_nothing_where_memory_asks_for_it() -> None:
    config = tiny_config(model={"num_layers": 6}, layout={"split": [2, 2, 2, 2]})
    held = choose_layout(subject(config), MACHINE, config, 4, [4], 1e9, has_times=False)
    assert isinstance(held, Choice)
    most = max(stage.total for stage in held.row.memory)
    less = choose_layout(subject(config), MACHINE, config, 4, [4], most - 1, has_times=False)
    assert isinstance(less, Choice)

    assert (held.row.schedule.slack, less.row.schedule.slack) == (1, 0)


def test_with_times_slack_is_what_the_simulation_gains_by() -> None:
    assert schedules(tiny_config(), has_times=True) == [None]
    found = chosen(1e9, has_times=True)
    assert isinstance(found, Choice)
    assert found.row.schedule.slack == 0  # one stage waits for nobody


@pytest.mark.parametrize(
    "pipeline", [{"slack": 3}, {"slack": 3, "prefer": "backward"}, {"schedule": "1f1b", "slack": 3}]
)
def test_a_slack_that_is_given_is_kept(pipeline: dict[str, Any]) -> None:
    [found] = schedules(tiny_config(pipeline=pipeline), has_times=True)

    assert found == Schedule(
        pipeline.get("schedule", "message-driven"), 3, pipeline.get("prefer", "alternate")
    )


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


def test_a_limit_has_to_hold_the_copies_of_checkpoints_as_well() -> None:
    sections: dict[str, Any] = {"train": {"steps": 20}}
    at_the_end = chosen(1e12, **sections)
    assert isinstance(at_the_end, Choice)
    need = max(stage.total for stage in at_the_end.row.memory)

    enough = chosen(need, **sections)
    assert isinstance(enough, Choice) and enough.row.grid.g_inter == 1
    more = chosen(need, **sections, checkpoint={"every": 1})
    assert isinstance(more, Rejection) or more.row.grid.g_inter > 1
