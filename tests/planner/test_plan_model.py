"""Plans of a configuration: what is planned, for which layouts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.planner_cases import cluster
from support.runs import tiny_config, tiny_gpt

import axsparse
from axsparse.planner import what_fits
from axsparse.planner.cluster import Cluster
from axsparse.planner.layout_search import Plan, split_layers
from axsparse.planner.plan_model import PlannedModel, planned_model
from axsparse.planner.plan_report import answer, cells, settings
from axsparse.planner.what_fits import DoesNotFitError
from axsparse.pruning.criteria import Score

MACHINE = cluster(peak_bf16=1e12, overhead_bytes=1e6, host_memory_bytes=None, host_bandwidth=None)


def asked(
    origins: dict[str, str] | None = None, machine: Cluster = MACHINE, **sections: Any
) -> PlannedModel:
    config = tiny_config(**sections)
    return planned_model(config.with_origins("tiny", origins or {}), machine, tiny_gpt(config))


def planned(gpus: int = 4, method: Any = "start", **sections: Any) -> Plan:
    return asked(**sections).plan(method, MACHINE, gpus)


def grids(**layout: Any) -> set[tuple[int, int, int]]:
    """Stages, tensor-parallel ranks and replicas of the planned layouts."""
    found = [row.layout.grid for row in planned(layout=layout).rows]
    return {(grid.g_inter, grid.g_tensor, grid.g_data) for grid in found}


def test_all_layouts_are_planned_unless_the_configuration_says_which() -> None:
    assert grids() == {(1, 1, 4), (2, 1, 2), (4, 1, 1)}
    assert grids(g_inter=2) == {(2, 1, 2)}
    assert grids(g_data=4) == {(1, 1, 4)}
    assert grids(split=[1, 3], g_tensor=1) == {(2, 1, 2)}
    assert grids(split=[1, 3], g_data=2) == {(2, 1, 2)}
    assert {each for _, each, _ in grids(g_tensor=2)} == {2}
    assert grids(g_tensor=2, g_data=2) == {(1, 2, 2)}


def test_a_run_is_planned_as_it_starts() -> None:
    pruned, later = asked(), asked(pruning={"sparsity": 0.8, "at_step": 3})

    assert pruned.profiled("start").is_pruned
    assert not pruned.profiled("dense").is_pruned
    assert not later.profiled("start").is_pruned
    assert later.profiled("samo").is_pruned
    assert later.notes[0].startswith("magnitude starts dense, and so it has to fit; ")
    assert pruned.notes == []


def test_replicas_that_share_the_optimizer_state_are_planned_so_and_the_plan_says_it() -> None:
    shared, whole = asked(samo={"zero_stage": "auto"}), asked()

    assert shared.notes[-1].startswith("samo.zero_stage: auto: where there are several ")
    (one,), (other,) = (each.plan("start", MACHINE, 2).rows[0].loads for each in (shared, whole))
    assert one.state.optimizer < 0.6 * other.state.optimizer


def test_both_ways_to_store_weights_are_rows_where_that_is_open() -> None:
    def ways_of(weights: str) -> Plan:
        samo, pruning = {"weights": weights}, {"include": "all"}
        return planned(1, samo=samo, precision="bf16", pruning=pruning)

    found = ways_of("auto")
    either = {weights: ways_of(weights) for weights in ("dense", "sparse")}

    for weights, alone in either.items():
        rows = [row for row in found.rows if row.weights == weights]
        by_size = [row.layout.microbatch_size for row in rows]
        assert sorted(by_size) == sorted(row.layout.microbatch_size for row in alone.rows)
        [like] = [row for row in alone.rows if row.layout.microbatch_size == by_size[0]]
        assert rows[0].most_bytes == like.most_bytes
        assert rows[0].seconds == like.seconds
    assert found.recommended.weights == "dense"
    assert cells(found, found.rows[-1])["weights"] in either
    assert "weights" not in cells(either["sparse"], either["sparse"].rows[0])


def test_a_limit_of_memory_has_everything_in_it() -> None:
    limited, free = asked(layout={"memory_per_rank": 2.0}), asked()

    assert limited.rank_budget(MACHINE) == 2e9
    assert free.rank_budget(MACHINE) == 1e6 + 0.8 * (MACHINE.memory_bytes - 1e6)
    assert (
        replace(free, dense=replace(free.dense, on_host=False)).rank_budget(MACHINE)
        == MACHINE.memory_bytes
    )


def in_memory(
    rank_budget: float, origins: dict[str, str] | None = None, **sections: Any
) -> PlannedModel:
    """A dense model, of a rank that may take so many bytes."""
    layout = {"memory_per_rank": rank_budget / 1e9, **sections.pop("layout", {})}
    return asked(origins, layout=layout, samo={"enabled": False}, **sections)


def rejected(gpus: int, rank_budget: float, **sections: Any) -> DoesNotFitError | None:
    """Why six blocks do not fit; None if they do."""
    try:
        in_memory(rank_budget, model={"num_layers": 6}, **sections).plan("start", MACHINE, gpus)
    except DoesNotFitError as error:
        return error
    return None


@pytest.mark.parametrize("gpus", [1, 3, 4])
def test_where_nothing_fits_both_figures_are_the_least_that_do(gpus: int) -> None:
    nothing = rejected(gpus, 1.0)
    assert nothing is not None
    least = nothing.least_bytes
    less = least - 0.1e6  # two digits are shown

    assert rejected(gpus, least) is None
    found = rejected(gpus, less)
    assert found is not None and found.fewest is not None
    assert found.least_bytes == least
    assert rejected(found.fewest, less) is None
    for fewer in range(gpus, found.fewest):
        assert rejected(fewer, less) is not None


def test_the_fewest_of_many_devices_are_found_with_few_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, split = [], split_layers

    def counted(*arguments: Any) -> Any:
        tried.append(arguments)
        return split(*arguments)

    monkeypatch.setattr(what_fits, "split_layers", counted)
    model = in_memory(1.3e6, model={"num_layers": 30}, batch={"global_batch_size": 512})

    with pytest.raises(DoesNotFitError) as found:
        model.plan("start", MACHINE, 64)

    assert found.value.fewest is not None
    assert len(tried) < 200, "not one for each number of devices"


def test_the_fewest_devices_take_microbatches_of_the_given_size() -> None:
    six = {"num_layers": 6}
    with pytest.raises(DoesNotFitError) as nothing:
        in_memory(1.0, model=six).plan("start", MACHINE, 1, [2])
    model = in_memory(nothing.value.least_bytes - 0.1e6, model=six)
    with pytest.raises(DoesNotFitError) as found:
        model.plan("start", MACHINE, 1, [2])

    fewest = found.value.fewest
    assert fewest is not None
    assert model.plan("start", MACHINE, fewest, [2]).recommended.layout.microbatch_size == 2


def test_where_no_number_of_devices_does_none_is_named() -> None:
    found = rejected(1, 1e6 + 1)
    given = rejected(2, 1.05e6, layout={"g_data": 2})

    assert found is not None and found.fewest is None
    assert given is not None and given.fewest is None, "others of as many replicas were not tried"


def test_activations_are_recomputed_only_where_nothing_fits_without_and_nobody_says_no() -> None:
    wide = {"sequence_length": 64}
    found = in_memory(1e9, model=wide).plan("start", MACHINE, 1)
    less = min(row.most_bytes for row in found.rows) - 1e3
    again = in_memory(less, model=wide).plan("start", MACHINE, 1)
    no = in_memory(less, {"pipeline.checkpoint_activations": "--set"}, model=wide)

    assert (found.request.model.recomputes, dict(found.taken)) == (False, {})
    assert again.request.model.recomputes
    assert dict(again.taken) == {"pipeline.checkpoint_activations": 1}
    assert "--set pipeline.checkpoint_activations=1 --set layout.g_inter=1 " in settings(again)
    assert answer(again).endswith(", recomputing activations")
    with pytest.raises(DoesNotFitError, match=r"^does not fit: 1 device would do with "):
        no.plan("start", MACHINE, 1)


def test_a_batch_that_nobody_gives_has_a_sample_for_each_device() -> None:
    free, given = asked(), asked({"batch.global_batch_size": "--set"})
    batch = free.config.batch.global_batch_size

    assert (free.batch(1), free.batch(1000), given.batch(1000)) == (batch, 1000, batch)


@pytest.mark.parametrize(
    ("lacking", "taken"), [((), "bf16"), (("bf16",), "fp16"), (("bf16", "fp16"), "fp32")]
)
def test_a_precision_left_to_auto_is_one_that_the_devices_have(
    lacking: tuple[str, ...], taken: str
) -> None:
    peaks = {f"peak_{name}": None if name in lacking else 1e14 for name in ("bf16", "fp16")}

    found = asked(machine=cluster(host_memory_bytes=None, **peaks), precision="auto")

    assert found.profiled("start").precision == taken
    notes = [f"summit has no units for bf16: planned as precision={taken}"] if lacking else []
    assert found.notes == notes


def test_on_gpus_copies_of_checkpoints_are_the_hosts_and_it_is_said() -> None:
    saves: dict[str, Any] = {"train": {"steps": 20}, "checkpoint": {"every": 5}}
    gpus = cluster(peak_bf16=1e12, host_memory_bytes=64e9)

    there = asked(machine=gpus, **saves)
    assert there.notes == [
        "of the host's 64.0 GB a rank takes up to 1.0 GB for copies of checkpoints, "
        "and messages under way where they go through it"
    ]
    assert there.plan("start", gpus, 2).recommended.memory[0].checkpoint == 0
    assert planned(2, **saves).recommended.memory[0].checkpoint > 0


def test_offloaded_state_is_not_in_the_memory_of_a_gpu() -> None:
    gpus = replace(MACHINE, host_memory_bytes=1e9, host_bandwidth=1e10)
    models = (asked(machine=gpus, precision="bf16", samo={"offload": o}) for o in (False, True))
    here, offloaded = (each.plan("start", gpus, 1).rows[0].memory[0] for each in models)

    assert offloaded.master == 0 < here.master
    assert 0 < offloaded.optimizer < here.master + here.optimizer  # room for two layers


@pytest.mark.parametrize(
    ("pruning", "score"),
    [
        ({"calibration_samples": 9000}, lambda name, weight, inputs: weight.abs() * inputs),
        ({"at_step": 2}, lambda name, weight, gradient: weight * gradient),
    ],
)
def test_a_plan_counts_what_a_score_takes_that_it_is_given(
    pruning: dict[str, Any], score: Score
) -> None:
    config = tiny_config(
        pruning={"method": "custom", **pruning},
        model={"hidden_size": 512},
        batch={"global_batch_size": 2, "microbatch_size": 1},
    )
    model = tiny_gpt(config)

    without = axsparse.plan_for(model, "laptop", 1, config)
    given = axsparse.plan_for(model, "laptop", 1, config, score=score)

    assert given.recommended.most_bytes > without.recommended.most_bytes
    assert given.request.cluster.name == "laptop"
