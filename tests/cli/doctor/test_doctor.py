"""`axsparse doctor`, by itself and under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS, run_mpirun

from axsparse.cli.doctor import doctor


def axsparse(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "axsparse", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def test_one_process_looks_at_its_machine(tmp_path: Path) -> None:
    said = axsparse("--run-dir", str(tmp_path / "runs"))

    lines = said.stdout.splitlines()
    assert said.stderr == ""
    assert lines[0] == f"✓ Python         {sys.version.split()[0]}"
    assert any(line.startswith("✓ MPI            ") for line in lines)
    assert lines[-1].startswith("  host ") and "rank 0 → " in lines[-1]
    # Whether somebody's killed job has left something is not ours to say.
    assert said.returncode == any(line.startswith("✗") for line in lines)


def test_under_mpirun_one_rank_speaks_for_all(tmp_path: Path) -> None:
    job = run_mpirun(2, ["-m", "axsparse", "doctor", "--json", "--run-dir", str(tmp_path)])

    told = json.loads(job.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1], str(job)
    assert {rank["size"] for rank in told["ranks"]} == {2}
    assert {rank["thread_level"] for rank in told["ranks"]} == {"multiple"}
    names = {finding["name"]: finding["mark"] for finding in told["findings"]}
    assert names["placement"] == names["MPI"] == names["disk"] == "ok"
    # Their own shared memory is in use.
    assert job.returncode == ("wrong" in names.values())


def test_ranks_that_do_not_find_each_other_are_wrong_and_one_says_so(tmp_path: Path) -> None:
    world = {"SLURM_STEP_NUM_TASKS": "4"}

    said = [axsparse(f"--run-dir={tmp_path}", **world, SLURM_PROCID=rank) for rank in "01"]

    assert [one.returncode for one in said] == [1, 1]
    assert "✗ MPI            size 1, but SLURM_STEP_NUM_TASKS is 4: " in said[0].stdout
    assert said[1].stdout == ""


def test_a_terminal_without_signs_gets_the_rest(tmp_path: Path) -> None:
    said = axsparse("--run-dir", str(tmp_path), PYTHONIOENCODING="ascii")

    assert said.stdout.startswith("? Python         3.")
    assert said.stderr == ""


def test_a_rank_that_cannot_look_ends_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such machine")

    monkeypatch.setattr("axsparse.cli.doctor.machine.look", fail)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # so that this process stays by itself

    with pytest.raises(SystemExit) as left:
        doctor.main([])

    assert left.value.code == 70
    assert capsys.readouterr().err == "axsparse: error: doctor: rank 0: no such machine\n"


def test_an_unknown_flag_is_refused() -> None:
    said = axsparse("--gpu")

    assert said.returncode == 78
    assert said.stderr == "axsparse: error: unrecognized arguments: --gpu; see --help\n"


def test_help_costs_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from axsparse.cli.doctor import doctor\n"
        "try: doctor.main(['--help'])\n"
        "except SystemExit: print({'torch', 'mpi4py'} & set(sys.modules))"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "is not there and need not be" in said.stdout
    assert said.stdout.splitlines()[-1] == "set()"
