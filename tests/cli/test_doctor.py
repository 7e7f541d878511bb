"""`axsparse doctor`: one machine, several ranks, and its conclusions from made-up facts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import Axsparse
from support.mpirun import run_fresh, run_mpirun

from axsparse.cli import doctor
from axsparse.cli.doctor import Facts, findings, look
from axsparse.runtime import process


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_wait_for_ranks_of_srun", lambda: None)


# --- the command -------------------------------------------------------------------------


def test_one_process_looks_at_its_machine(tmp_path: Path) -> None:
    """In a terminal without signs, which gets the rest."""
    command = ("-m", "axsparse", "doctor", "--run-dir", str(tmp_path / "runs"))
    said = run_fresh(*command, env={"PYTHONIOENCODING": "ascii"})

    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith(f"? versions: Python {sys.version.split()[0]}, axsparse ")


def test_under_mpirun_one_rank_speaks_for_all(tmp_path: Path) -> None:
    job = run_mpirun(2, ["-m", "axsparse", "doctor", "--run-dir", str(tmp_path)])

    lines = job.stdout.splitlines()
    assert ", MPI " in lines[0], str(job)
    assert len([line for line in lines if "2 ranks on " in line and " host " in line]) == 1
    assert job.returncode == int("✗" in job.stdout)


def test_ranks_that_do_not_find_each_other_are_wrong_and_one_says_so(
    axsparse: Axsparse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")

    code, screen, _ = axsparse("doctor", "--run-dir", tmp_path)
    assert code == 1
    assert "\n✗ MPI: size 1, but SLURM_STEP_NUM_TASKS is 4: launcher and MPI library" in screen

    monkeypatch.setenv("SLURM_PROCID", "1")
    assert axsparse("doctor", "--run-dir", tmp_path) == (1, "", "")


def test_a_rank_that_cannot_look_ends_all(
    axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such machine")

    monkeypatch.setattr(doctor, "look", fail)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # so that this process stays by itself

    assert axsparse("doctor") == (70, "", "axsparse: error: doctor: rank 0: no such machine\n")


def test_a_launcher_beside_the_environments_own_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("env", "site"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))

    monkeypatch.setenv("PATH", str(tmp_path / "site"))
    facts = look(tmp_path / "runs" / "mine")
    assert facts["mpirun"] == str(tmp_path / "site" / "mpirun")
    assert facts["where"] == str(tmp_path) and facts["room"] > 0
    (tmp_path / "file").touch(mode=0o755)
    for name in ("file", "file/runs"):
        facts = look(tmp_path / name)
        assert (facts["where"], facts["room"]) == (str(tmp_path / "file"), 0)
    monkeypatch.setenv("PATH", str(tmp_path / "env"))
    assert look(tmp_path)["mpirun"] is None


# --- findings ----------------------------------------------------------------------------

LAPTOP: Facts = {
    **{"rank": 0, "problem": None, "host": "one", "Python": "3.11.7", "axsparse": "0.1.0"},
    **{"torch": "2.9.0", "MPI": None, "CUDA": None, "CuPy": None, "mpirun": None},
    **{"wheels": [], "uuids": [], "threads": "1", "cores": [0, 1, 2, 3]},
    **{"memory": 10**10, "room": 10**11, "where": "/runs"},
}
TABLE = yaml.safe_load(Path(__file__).with_name("doctor.yaml").read_text(encoding="utf-8"))


def lines(*each: dict[str, Any], **common: Any) -> list[str]:
    """The findings of ranks: a laptop's, but for the facts that are given."""
    ranks = [{**LAPTOP, "rank": rank, **common, **own} for rank, own in enumerate(each)]
    return [*findings(ranks)]


def test_where_nothing_is_wrong_versions_and_hosts_are_all_that_is_said() -> None:
    assert lines({}) == [
        "✓ versions: Python 3.11.7, axsparse 0.1.0, torch 2.9.0",
        "✓ host one: 1 rank on 0 GPUs and 4 cores",
    ]
    assert lines({}, {}, {"host": "two"}, {"host": "two"}, **TABLE["gpus"]) == [
        "✓ versions: Python 3.11.7, axsparse 0.1.0, torch 2.9.0, CUDA 12.8, CuPy 14.2.0",
        "✓ host one: 2 ranks on 2 GPUs and 8 cores",
        "✓ host two: 2 ranks on 2 GPUs and 8 cores",
    ]


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["line"])
def test_a_mistake_is_a_line_with_its_mend(row: dict[str, Any]) -> None:
    said = lines(*row["ranks"], **row.get("all", {}))
    wrong = [line for line in said if not line.startswith("✓")]

    assert len(wrong) == 1 and wrong[0].startswith(row["line"]), wrong
