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
    only_backward,
    predict,
    schedules,
    split_trade,
)
from axsparse.planner.schedule_choice import Trade
from axsparse.planner.surveyed_model import SurveyedModel, copied_bytes
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW

MACHINE = cluster(overhead_bytes=0.0, jitter=0.0)


def subject(config: Config) -> SurveyedModel:
    return SurveyedModel(config, survey(tiny_gpt(config)), "tiny", {}, ADAMW)


@pytest.mark.parametrize(
    ("pipeline", "has_times", "expected"),
    [
        ({}, True, None),
        ({"slack": 3}, True, [Schedule("message-driven", 3, "alternate")]),
        (
            {"slack": 3, "prefer": "backward"},
            True,
            [Schedule("message-driven", 3, "backward")],
        ),
        ({"schedule": "1f1b", "slack": 3}, True, [Schedule("1f1b", 3, "alternate")]),
        # Other schedules, and plans without times, go without a search.
        ({"schedule": "1f1b"}, True, [Schedule("1f1b", slack, "alternate") for slack in (1, 0)]),
        ({}, False, [Schedule("message-driven", slack, "alternate") for slack in (1, 0)]),
        (
            {"split_backward": True},
            False,
            [
                Schedule("message-driven", slack, "alternate", split_backward=True)
                for slack in (1, 0)
            ],
        ),
        (
            {"slack": 2, "split_backward": True, "held": 9.5},
            True,
            [Schedule("message-driven", 2, "alternate", split_backward=True, held=9.5)],
        ),
    ],
)
def test_what_a_configuration_leaves_open_is_searched_or_tried(
    pipeline: dict[str, Any], has_times: bool, expected: list[Schedule] | None
) -> None:
    assert schedules(tiny_config(pipeline=pipeline), has_times=has_times) == expected


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


@pytest.mark.parametrize("machine", [None, MACHINE])
def test_a_prediction_has_times_only_with_a_cluster(machine: Cluster | None) -> None:
    config = tiny_config()
    found = predict(subject(config), machine, config, Grid(2, 2), 1, "because")
    other = predict(subject(config), MACHINE, config, Grid(2, 2), 1, None)

    assert (found.step_seconds is None) == (machine is None)
    assert found.memory_bytes == other.memory_bytes > 0
    assert found.reason == "because"
    # It is the peak before the first checkpoint.
    peaks = set()
    for every in (20, 1):
        config = tiny_config(train={"steps": 20}, checkpoint={"every": every})
        peaks.add(predict(subject(config), machine, config, Grid(2, 2), 1, None).memory_bytes)
    assert len(peaks) == 1


@pytest.mark.parametrize(("every", "expected"), [(0, 0), (5, 2e9), (19, 2e9), (20, 0)])
def test_a_checkpoint_takes_memory_of_training_unless_it_is_the_last(
    every: int, expected: float
) -> None:
    config = tiny_config(train={"steps": 20}, checkpoint={"every": every, "buffer": 2.0})

    assert copied_bytes(config) == expected
    [load] = subject(config).stages(1, 1) or []
    assert (load.saved > 0) == (expected > 0)
    elsewhere = SurveyedModel(config, survey(tiny_gpt(config)), "tiny", {}, ADAMW, on_host=False)
    assert [load.saved for load in elsewhere.stages(1, 1) or []] == [0]
