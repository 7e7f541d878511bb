"""The planner's view of a configured run, and its prediction."""

from __future__ import annotations

from typing import Any

import pytest
from support.planner_cases import cluster
from support.runs import tiny_config, tiny_gpt

from axsparse.config.schema import Config
from axsparse.models.model_profile import profile
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster
from axsparse.planner.profiled_model import ProfiledModel, copied_bytes
from axsparse.planner.run_workload import (
    only_backward,
    predict,
    schedules,
    splits_backward,
)
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW

MACHINE = cluster(overhead_bytes=0.0, jitter=0.0)


def planned_model(config: Config) -> ProfiledModel:
    return ProfiledModel(config, profile(tiny_gpt(config)), "tiny", {}, ADAMW)


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (
            {},
            [
                Schedule("message-driven", extra_in_flight, "alternate")
                for extra_in_flight in (1, 0)
            ],
        ),
        ({"extra_in_flight": 3, "prefer": "backward"}, [Schedule("message-driven", 3, "backward")]),
        (
            {"schedule": "1f1b"},
            [Schedule("1f1b", extra_in_flight, "alternate") for extra_in_flight in (1, 0)],
        ),
        (
            {"extra_in_flight": 2, "split_backward": True},
            [Schedule("message-driven", 2, "alternate", split_backward=True)],
        ),
    ],
)
def test_a_slack_that_is_left_open_is_the_default_or_else_none(
    pipeline: dict[str, Any], expected: list[Schedule]
) -> None:
    assert schedules(tiny_config(pipeline=pipeline)) == expected


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({}, None),
        ({"compile": True}, False),
        ({"checkpoint_activations": 2}, False),
        ({"schedule": "gpipe"}, False),
        ({"schedule": "gpipe", "split_backward": True}, True),
        ({"split_backward": False}, False),
    ],
)
def test_which_backwards_a_configuration_allows(
    pipeline: dict[str, Any], expected: bool | None
) -> None:
    settings = tiny_config(pipeline=pipeline).pipeline

    assert only_backward(settings) is expected
    assert [splits_backward(settings, stages) for stages in (1, 2)] == (
        [False, True] if expected is None else [expected] * 2
    )


@pytest.mark.parametrize("machine", [None, MACHINE])
def test_a_prediction_has_times_only_with_a_cluster(machine: Cluster | None) -> None:
    config = tiny_config()
    found = predict(planned_model(config), machine, config, Grid(2, 2), 1, "because")
    other = predict(planned_model(config), MACHINE, config, Grid(2, 2), 1, None)

    assert (found.step_seconds is None) == (machine is None)
    assert found.memory_bytes == other.memory_bytes > 0
    assert found.reason == "because"
    # It is the peak before the first checkpoint.
    peaks = set()
    for every in (20, 1):
        config = tiny_config(train={"steps": 20}, checkpoint={"every": every})
        peaks.add(predict(planned_model(config), machine, config, Grid(2, 2), 1, None).memory_bytes)
    assert len(peaks) == 1


@pytest.mark.parametrize(("every", "expected"), [(0, 0), (5, 2e9), (19, 2e9), (20, 0)])
def test_a_checkpoint_takes_memory_of_training_unless_it_is_the_last(
    every: int, expected: float
) -> None:
    config = tiny_config(train={"steps": 20}, checkpoint={"every": every, "staging_memory": 2.0})

    assert copied_bytes(config) == expected
    [load] = planned_model(config).stages(1, 1) or []
    assert (load.saved > 0) == (expected > 0)
    elsewhere = ProfiledModel(config, profile(tiny_gpt(config)), "tiny", {}, ADAMW, on_host=False)
    assert [load.saved for load in elsewhere.stages(1, 1) or []] == [0]
