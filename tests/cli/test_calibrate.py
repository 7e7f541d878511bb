"""`axsparse calibrate` on two ranks, and a plan by what it measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.mpirun import run_mpirun

from axsparse.cli.machine_timing import _profile, calibrate
from axsparse.config.load import load_config
from axsparse.planner.cluster import load_cluster
from axsparse.runtime.errors import EXIT_CONFIG, EXIT_OUTPUT, ConfigError
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

SMALL = [
    *("--config", "quickstart.yaml", "--set", "model.hidden_size=128"),
    *("--set", "model.num_layers=2"),
]


@pytest.mark.exhaustive
def test_a_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    # Medians of two steps are at times nonsense where tests beside this one have the cores.
    command = ["-m", "axsparse", "calibrate", *SMALL, "--out", "mine.yaml", "--steps", "9"]
    done = run_mpirun(2, command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    machine = load_cluster(str(tmp_path / "mine.yaml"))
    kinds = {name: origin.kind for name, origin in machine.origins.items()}
    assert machine.gpus_per_node == 2
    assert 0 < machine.efficiency <= 1
    for name in ("intra_node_bandwidth", "ring_bandwidth", "compression_rate", "overhead_bytes"):
        assert kinds[name] == "measured"
        assert getattr(machine, name) > 0
    assert "axsparse: wrote mine.yaml" in done.stdout
    said = [line.split(": ")[1] for line in done.stderr.splitlines() if " measures " in line]
    assert said == [f"measures {part}/5" for part in range(1, 6)]
    assert kinds["weight_share"] == "fitted"
    assert machine.weight_share is not None
    assert 0 < machine.weight_share < 10

    plan = ["-m", "axsparse", "plan", *SMALL, "--gpus", "2", "--cluster", "mine.yaml", "--json"]
    done = run_mpirun(1, plan, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"][0]["rows"][0]["step_seconds"] > 0


def test_mistakes_are_one_line(axsparse: Axsparse) -> None:
    for words, text in (
        (["--out", "a.yaml", "--steps", "0"], "argument --steps: '0' is no whole number from 1 to"),
        (["--steps", "1"], "the following arguments are required: --out"),
    ):
        assert_one_line(axsparse("calibrate", *SMALL, *words), EXIT_CONFIG, text)


def test_ranks_of_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world: LocalWorld[None] = LocalWorld(2)
    hosts = itertools.count()
    monkeypatch.setattr("socket.gethostname", lambda: f"host{next(hosts)}")
    loaded = load_config("quickstart.yaml")

    def main(rank: int) -> None:
        calibrate(LocalTransport(world, rank), loaded, "mine", 1)

    with pytest.raises(ConfigError, match="calibrate: the ranks stand on 2 hosts; start it on the"):
        world.run(main)


def test_weight_gradients_are_timed_whatever_the_schedule() -> None:
    asked = ["model.hidden_size=128", "model.num_layers=1", "pipeline.schedule=1f1b"]
    loaded = load_config("quickstart.yaml", [*asked, "pipeline.split_backward=false"])

    profile = _profile(loaded, steps=2, size=1, is_split=True)

    assert 0 < profile.weight < profile.compute


@pytest.mark.exhaustive
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    out = ["--out", "nowhere/mine.yaml", "--steps", "1"]
    done = run_mpirun(1, ["-m", "axsparse", "calibrate", *SMALL, *out], cwd=tmp_path)

    assert done.returncode == EXIT_OUTPUT
    assert "the cluster file cannot be written (No such file" in done.stderr
