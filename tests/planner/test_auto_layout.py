"""The layout that a run takes: the fewest stages that fit, and the grid of ranks and settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.planner_cases import cluster, unpruned
from support.runs import tiny_config, tiny_gpt

from axsparse.config.load import configure
from axsparse.config.schema import Config
from axsparse.config.validate import check_batch
from axsparse.models.model_profile import profile
from axsparse.pipeline.policy import Schedule
from axsparse.planner.auto_layout import (
    LayoutDecision,
    Prediction,
    fewest_stages,
    predict,
    resolve_grid,
    run_request,
)
from axsparse.planner.cluster import Cluster
from axsparse.planner.layout_search import Rejection, splits_backward
from axsparse.planner.profiled_model import ProfiledModel, copied_bytes
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW

MACHINE = cluster(overhead_bytes=0.0, jitter=0.0)


def fewest(config: Config, stages: Sequence[int], rank_budget: float) -> LayoutDecision | Rejection:
    return fewest_stages(run_request(unpruned(config), MACHINE, 4, stages, rank_budget))


def chosen(rank_budget: float) -> LayoutDecision | Rejection:
    return fewest(tiny_config(), [1, 2, 4], rank_budget)


def test_the_fewest_stages_that_fit_are_taken_and_it_is_said_why() -> None:
    roomy = chosen(1e9)
    assert isinstance(roomy, LayoutDecision)
    tight, none = chosen(0.8 * roomy.row.most_bytes), chosen(1e3)

    assert isinstance(tight, LayoutDecision)
    assert (roomy.row.layout.grid, tight.row.layout.grid) == (Grid(1, 4), Grid(2, 2))
    most = roomy.row.most_bytes / 1e9
    assert roomy.reason == f"1 stage (the fewest that fit: {most:.2g} of 1 GB a rank)"
    assert tight.reason.startswith("2 stages (the fewest that fit: ")
    assert "GB a rank; with 1, stage 0 needs " in tight.reason
    # Where nothing fits the last is given back with its reason.
    assert isinstance(none, Rejection)
    assert none.g_inter == 4
    assert " GB of 0.0000" in none.reason


@pytest.mark.parametrize(
    ("samo", "sizes", "pruned", "way", "reason"),
    [
        # Dense weights come first, and sparse ones fit fewer stages.
        ({"weights": "auto"}, {"hidden_size": 256}, "c1.weight", "sparse", "sparse at rest"),
        # Replicas gather weights where nothing else fits.
        (
            {"weights": "sparse", "zero_stage": "auto"},
            {"num_layers": 8, "hidden_size": 128},
            "weight",
            "gathered",
            "sparse at rest and gathered by replicas",
        ),
    ],
)
def test_weights_are_stored_in_another_way_where_that_fits_fewer_stages(
    samo: dict[str, Any], sizes: dict[str, int], pruned: str, way: str, reason: str
) -> None:
    config = tiny_config(precision="fp16", samo=samo, model=sizes)
    profiled = profile(tiny_gpt(config), torch.float16)
    matrices = [p for each in profiled.layers for p in each.parameters if p.numel > 999]
    kept = {p.name: p.numel // 10 for p in matrices if p.name.endswith(pruned)}
    assert kept
    planned_model = ProfiledModel(config, profiled, kept, ADAMW)

    def found(nbytes: float) -> LayoutDecision:
        decision = fewest_stages(run_request(planned_model, MACHINE, 2, [1, 2], nbytes))
        assert isinstance(decision, LayoutDecision)
        return decision

    roomy = found(1e12).row
    tight = found(0.99 * roomy.most_bytes)

    assert (roomy.weights, roomy.layout.grid.g_inter) == ("dense", 1), "as configured"
    assert (tight.row.weights, tight.row.layout.grid.g_inter) == (way, 1)
    assert tight.row.most_bytes < roomy.most_bytes
    assert tight.row.seconds > roomy.seconds, "it expands"
    assert tight.reason.endswith(f" GB a rank, with weights {reason})")


def test_slack_goes_where_memory_asks_for_it() -> None:
    config = tiny_config(model={"num_layers": 6}, layout={"split": [2, 2, 2, 2]})
    found, rank_budget = [], 1e9
    for _ in range(2):
        choice = fewest(config, [4], rank_budget)
        assert isinstance(choice, LayoutDecision)
        found.append(choice.row.layout.schedule.extra_in_flight)
        rank_budget = choice.row.most_bytes

    # extra_in_flight is an option, for which no more than 85 % of the memory is used.
    assert found == [1, 0]


# -- resolve_grid ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "num_layers", "overrides", "grid"),
    [
        (1, 8, (), Grid(1, 1)),
        (6, 8, (), Grid(1, 6)),
        (6, 8, ("layout.split=[4, 4]",), Grid(2, 3)),
        (4, 1, (), Grid(1, 4)),
        (8, 8, ("layout.g_inter=8",), Grid(8, 1)),
        (6, 8, ("layout.g_inter=3",), Grid(3, 2)),
        (6, 8, ("layout.g_data=2",), Grid(3, 2)),
        (6, 8, ("layout.g_inter=2", "layout.g_data=3"), Grid(2, 3)),
        (6, 8, ("layout.g_inter=3", "layout.split=[2, 2, 4]"), Grid(3, 2)),
        (1, 8, ("layout.split=[8]",), Grid(1, 1)),
    ],
)
def test_the_layout_follows_from_ranks_and_settings(
    ranks: int, num_layers: int, overrides: tuple[str, ...], grid: Grid
) -> None:
    assert resolve_grid(configure(None, overrides), ranks, num_layers) == grid


LAYOUTS = itertools.product(
    *(("auto", 1, 2, 4, 6), ("auto", 1, 2, 3), (1, 2, 4), ("auto", (3, 2), (2, 2, 1))),
    *((1, 2, 3, 4, 6, 7, 12), (2, 24)),
)
"""Of g_inter, g_data, g_tensor, split, ranks and the batch."""


def test_each_way_out_of_a_layout_ends_in_a_grid() -> None:
    tried: set[str] = set()
    for g_inter, g_data, g_tensor, split, ranks, batch in LAYOUTS:
        given = {"g_inter": g_inter, "g_data": g_data, "g_tensor": g_tensor, "split": split}
        if split != "auto" and g_inter not in ("auto", len(split)):
            continue
        values = {f"layout.{key}": value for key, value in given.items()}
        batches = {"batch.global_batch_size": batch, "batch.microbatch_size": 1}
        config = Config().with_values({**values, **batches})
        try:
            resolve_grid(config, ranks, 5)
            continue
        except ConfigError as error:
            said = str(error)
        if " entries" in said:  # Another mistake.
            continue
        of_key, _, ways = said.rpartition("; ")
        for way in ways.split(" or "):
            start = re.search(r"start (\d+) rank", way)
            key = re.search(r"set (layout\.\w+) to", way) or re.match(r"(\S+)", of_key)
            numbers = re.search(r"(?:choose|set \S+ to) (?:one of )?([\d, ]+)", way)
            assert start or numbers, said
            assert key is not None
            others = re.findall(r"and (layout\.\w+)", way)
            for number in numbers[1].rstrip(", ").split(", ") if numbers else [None]:
                changed: dict[str, object] = dict.fromkeys(others, "auto")
                changed |= {} if number is None else {key[1]: int(number)}
                new, count = config.with_values(changed), int(start[1]) if start else ranks
                check_batch(new, resolve_grid(new, count, 5))
            tried.add(re.sub(r"[\d, ]+", "N", way))
    assert len(tried) > 5, tried


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({}, [Schedule("message-driven", extra_in_flight) for extra_in_flight in (1, 0)]),
        ({"extra_in_flight": 3}, [Schedule("message-driven", 3)]),
        ({"schedule": "1f1b"}, [Schedule("1f1b", extra_in_flight) for extra_in_flight in (1, 0)]),
        (
            {"extra_in_flight": 2, "split_backward": True},
            [Schedule("message-driven", 2, split_backward=True)],
        ),
    ],
)
def test_a_slack_that_is_left_open_is_the_default_or_else_none(
    pipeline: dict[str, Any], expected: list[Schedule]
) -> None:
    config = tiny_config(pipeline=pipeline)

    request = run_request(unpruned(config), MACHINE, 4, None, 1e9)

    assert request.schedules == expected


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ({}, [False, True]),
        ({"compile": True}, [False, False]),
        ({"checkpoint_activations": 2}, [False, False]),
        ({"schedule": "gpipe"}, [False, False]),
        ({"schedule": "gpipe", "split_backward": True}, [True, True]),
        ({"split_backward": False}, [False, False]),
    ],
)
def test_which_backwards_a_configuration_allows(
    pipeline: dict[str, Any], expected: list[bool]
) -> None:
    settings = tiny_config(pipeline=pipeline).pipeline

    assert [splits_backward(settings, stages) for stages in (1, 2)] == expected


@pytest.mark.parametrize("machine", [None, MACHINE])
def test_a_prediction_has_times_only_with_a_cluster(machine: Cluster | None) -> None:
    def predicted(machine: Cluster | None, **sections: Any) -> Prediction:
        config = tiny_config(pipeline={"extra_in_flight": 1}, train={"steps": 20}, **sections)
        return predict(unpruned(config), Grid(2, 2), machine)

    found, other = predicted(machine), predicted(MACHINE)

    assert (found.step_seconds is None) == (machine is None)
    assert found.memory_bytes == other.memory_bytes > 0
    # It is the peak before the first checkpoint.
    assert predicted(machine, checkpoint={"every": 1}).memory_bytes == found.memory_bytes
    # One microbatch may be larger than the batch.
    large = tiny_config(batch={"microbatch_size": 16})
    assert predict(unpruned(large), Grid(2, 1), machine).memory_bytes > found.memory_bytes


@pytest.mark.parametrize(("every", "expected"), [(0, 0), (5, 1e9), (19, 1e9), (20, 0)])
def test_a_checkpoint_takes_memory_of_training_unless_it_is_the_last(
    every: int, expected: float
) -> None:
    config = tiny_config(train={"steps": 20}, checkpoint={"every": every})

    assert copied_bytes(config) == expected
    [load] = unpruned(config).stages(1, 1) or []
    assert (load.saved > 0) == (expected > 0)
    elsewhere = unpruned(config, on_host=False)
    assert [load.saved for load in elsewhere.stages(1, 1) or []] == [0]
