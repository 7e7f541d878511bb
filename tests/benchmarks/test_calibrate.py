"""From a machine's figures to its constants and back through the cost model, and on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import calibrate
import pytest
from calibrate import Measurements, fitted, spread
from support.mpirun import run_mpirun
from support.planner_cases import surveyed

from axsparse.planner.cluster import Cluster, load_cluster, parse_cluster, to_yaml
from axsparse.planner.step_cost import all_reduce_seconds, edges, stage_seconds, step_costs
from axsparse.planner.workload import StageLoad
from axsparse.runtime.errors import TrainingError
from axsparse.runtime.grid import Grid

MODEL = surveyed(precision="fp32")
SEEN = Measurements(
    ranks=4,
    memory_bytes=4e9,
    overhead_bytes=3e8,
    peak=1e10,
    copy_bandwidth=1e9,
    compute_seconds=1e-4,
    compute_of_other=None,
    compress_seconds=2e-5,
    microbatches=3,
    microbatch_size=2,
    forwards=[1.0, 1.0, 1.1, 0.9],
    messages=[(1e3, 1e-3 + 2e3 / 1e8), (1e5, 1e-3 + 2e5 / 1e8), (1e6, 1e-3 + 2e6 / 1e8)],
    all_reduces=[(1e3, 6e-4 + 1.5e3 / 1e7), (1e6, 6e-4 + 1.5e6 / 1e7)],
)


[LOAD] = MODEL.stages(1, 1) or []
SPLIT = replace(LOAD, weight_flops=9e3)


def machine_of(load: StageLoad = LOAD, **seen: Any) -> Cluster:
    """The cluster that is fitted to `SEEN` with some other measurements."""
    return fitted("mine", load, "fp32", replace(SEEN, **seen), "a test")


def compute(machine: Cluster, size: int = 2, load: StageLoad = LOAD) -> float:
    """Seconds of three microbatches as the cost model has them, without compression."""
    stage = stage_seconds(MODEL, load, machine, size)
    return 3 * (stage.forward + stage.backward - stage.compress)


def test_the_cost_model_gives_back_what_was_measured_and_the_file_reads_back() -> None:
    machine = machine_of()

    assert compute(machine) == pytest.approx(SEEN.compute_seconds)
    compress = 3 * stage_seconds(MODEL, LOAD, machine, 2).compress
    assert compress == pytest.approx(SEEN.compress_seconds)
    assert 0 < machine.efficiency <= 1
    # Messages and all-reduces come back as well.
    costs = step_costs(MODEL, MODEL.stages(2, 1) or [], machine, Grid(2, 1), 1)
    [edge] = edges(replace(costs, messages=[1e5]), machine, Grid(2, 1), 0)
    assert edge.latency + 2 * edge.handling == pytest.approx(1e-3 + 2e5 / 1e8)
    assert all_reduce_seconds(1e6, machine, Grid(1, 4)) == pytest.approx(6e-4 + 0.15)
    # Small blocks come on top of what is resident before the first step.
    assert machine.overhead_bytes == SEEN.overhead_bytes + 10e6
    assert machine.origins["overhead_bytes"].source.endswith("and 10 MB later")
    assert machine.is_of_hosts
    assert parse_cluster(to_yaml(machine), "mine.yaml") == machine
    kinds = {name: origin.kind for name, origin in machine.origins.items()}
    assert (kinds["efficiency"], kinds["ring_latency"]) == ("fitted", "measured")
    assert kinds["nic_bandwidth"] == kinds["inter_node_bandwidth"] == "assumed"


@pytest.mark.parametrize("passed", [0.0, 3e-5])
def test_weight_gradients_take_what_was_measured_of_them(passed: float) -> None:
    machine = machine_of(
        SPLIT,
        compute_seconds=SEEN.compute_seconds + passed,
        compute_of_other=(1, SEEN.compute_seconds / 2 + passed),
        weight_seconds=4e-5,
    )
    stage = stage_seconds(MODEL, SPLIT, machine, 2)

    assert 3 * (stage.weight - stage.compress) == pytest.approx(4e-5)
    assert machine.origins["weight_share"].source == "a test, with split backwards"
    assert parse_cluster(to_yaml(machine), "mine.yaml") == machine


@pytest.mark.parametrize(
    ("load", "seen", "share"),
    [
        # On a busy machine they may seem shorter than a pass over the weights.
        (
            SPLIT,
            {"compute_seconds": 1.3e-4, "compute_of_other": (1, 8e-5), "weight_seconds": 1e-7},
            0.1,
        ),
        (LOAD, {"weight_seconds": 4e-5}, None),
        (SPLIT, {"weight_seconds": 0.0}, None),
    ],
)
def test_weight_gradients_have_a_share_where_it_is_known(
    load: StageLoad, seen: dict[str, Any], share: float | None
) -> None:
    assert machine_of(load, **seen).weight_share == share


@pytest.mark.parametrize("other", [1, 4])
def test_two_sizes_tell_what_does_not_depend_on_size(other: int) -> None:
    slower = SEEN.compute_seconds / 2 * other + 3e-5
    machine = machine_of(compute_seconds=1e-4 + 3e-5, compute_of_other=(other, slower))

    assert compute(machine, 2) == pytest.approx(1e-4 + 3e-5)
    assert compute(machine, other) == pytest.approx(slower)
    assert machine.origins["weight_rate"].kind == "fitted"
    assert machine_of(compute_of_other=(1, SEEN.compute_seconds / 3)).weight_rate is None


def test_one_rank_knows_nothing_of_messages_and_noise_falls_back_to_a_rate() -> None:
    alone = machine_of(ranks=1, messages=[], all_reduces=[], compress_seconds=0.0)
    noise = machine_of(messages=[(1e3, 2e-3), (1e6, 1e-3)])

    for name in ("intra_node_bandwidth", "ring_bandwidth", "compression_rate"):
        assert alone.origins[name].kind == "assumed"
        assert getattr(alone, name) > 0
    assert noise.intra_node_latency == 0 < noise.intra_node_bandwidth


def test_compute_is_at_most_as_fast_as_the_peak_and_a_copy() -> None:
    machine = machine_of(peak=1.0)

    assert machine.efficiency == 1 < machine.peak("fp32")
    with pytest.raises(
        TrainingError, match=r"calibrate: forwards and backwards took 1e-09 s, less"
    ):
        machine_of(compute_seconds=1e-9)


def test_spread_is_that_of_logarithms_without_the_slowest_tenth() -> None:
    assert spread([1.0] * 18 + [50.0, 60.0]) == 0
    assert spread([1.0]) == 0
    assert spread([1.0, 1.1, 1.21, 99.0]) > 0.05


@pytest.mark.exhaustive
def test_a_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    small = ["--config", "quickstart.yaml", "--set", "model.hidden_size=128"]
    # Medians of two steps are at times nonsense where tests beside this one have the cores.
    command = [calibrate.__file__, *small, "--out", "mine.yaml", "--steps", "9"]
    done = run_mpirun(2, command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    machine = load_cluster(str(tmp_path / "mine.yaml"))
    kinds = {name: origin.kind for name, origin in machine.origins.items()}
    assert machine.gpus_per_node == 2
    assert 0 < machine.efficiency <= 1
    for name in ("intra_node_bandwidth", "ring_bandwidth", "compression_rate", "overhead_bytes"):
        assert kinds[name] == "measured"
        assert getattr(machine, name) > 0
    assert kinds["weight_share"] == "fitted"

    plan = ["-m", "axsparse", "plan", *small, "--gpus", "2", "--cluster", "mine.yaml", "--json"]
    done = run_mpirun(1, plan, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"][0]["rows"][0]["step_seconds"] > 0
