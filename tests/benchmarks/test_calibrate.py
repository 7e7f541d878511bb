"""From a machine's figures to its constants and back through the cost model, and on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import calibrate
import pytest
from calibrate import Measurements, fitted
from support.mpirun import run_mpirun
from support.planner_cases import profiled

from axsparse.planner.cluster import Cluster, load_cluster, parse_cluster, to_yaml
from axsparse.planner.step_cost import all_reduce_seconds, edges, stage_seconds, step_costs
from axsparse.planner.workload import StageLoad
from axsparse.runtime.grid import Grid

MODEL = profiled(precision="fp32")
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
