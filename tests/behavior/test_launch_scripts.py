"""The templates of `launch/`, and the one that runs as it is."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import standin_trainer
from support.directives import assert_a_shell_reads
from support.mpirun import ENVIRONMENT, KILLED, LONGEST_SECONDS, mpirun_path

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that trains by counting steps, whatever module it is told to run."""
    path = tmp_path / "python"
    words = [sys.executable, str(Path(standin_trainer.__file__).resolve())]
    path.write_text(f'#!/bin/sh\nshift 2\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def start(python: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(LAUNCH / "mpirun.sh"), *arguments],
        cwd=python.parent,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHON": str(python),
            "MPIRUN": mpirun_path(),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell would hand down ignored signals.
        start_new_session=True,
    )


def begins(folder: Path, rank: int) -> list[int]:
    lines = map(json.loads, (folder / f"rank-{rank}.jsonl").read_text().splitlines())
    return [line["begin"] for line in lines if isinstance(line, dict)]


@pytest.mark.parametrize("name", ["mpirun.sh", "slurm.sh", "lsf.sh"])
def test_templates_are_for_bash(name: str) -> None:
    assert (LAUNCH / name).read_text().startswith("#!/bin/bash\n")


def test_shells_can_read_the_one_that_runs_as_it_is() -> None:
    assert_a_shell_reads((LAUNCH / "mpirun.sh").read_text())
    assert os.access(LAUNCH / "mpirun.sh", os.X_OK)


def test_without_a_scheduler_a_killed_rank_starts_all_again(python: Path, tmp_path: Path) -> None:
    job = start(python, "2", "--run-dir=my r", "--set=x=a  b", STANDIN_KILL_AT="5")
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 0, said
    assert begins(tmp_path / "my r", 1) == [0, 4]
    [code] = re.findall(r"axsparse: the ranks ended with (\d+); going on from the last", said)
    assert int(code) in KILLED, said
    first = json.loads((tmp_path / "my r" / "rank-0.jsonl").read_text().splitlines()[0])
    assert first["arguments"] == ["--run-dir=my r", "--set=x=a  b", "--resume", "auto"]
    assert first["ranks"] == "2"


@pytest.mark.parametrize(("code", "count"), [(70, 3), (255, 3), (78, 1), (75, 1)])
def test_only_what_a_restart_may_mend_is_started_again(
    python: Path, tmp_path: Path, code: int, count: int
) -> None:
    job = start(python, "1", "--run-dir=r", STANDIN_EXIT=f"1:{code}", RESTARTS="2")
    job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == code
    assert begins(tmp_path / "r", 0) == [0] * count


@pytest.mark.parametrize("code", [75, 255])
def test_a_warning_saves_and_stops(python: Path, tmp_path: Path, code: int) -> None:
    """255 is what bash takes a code for that it has lost to the signal."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    pipe = os.open(ready, os.O_RDWR)
    long = {"STANDIN_STEPS": "1000000000", "STANDIN_WARNED_CODE": str(code)}
    job = start(python, "2", "--run-dir=r", STANDIN_READY=str(ready), **long)
    try:
        for _ in range(2):
            assert select.select([pipe], [], [], 60)[0], "a rank has not begun"
            os.read(pipe, 1)
        job.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=LONGEST_SECONDS)
    finally:
        os.close(pipe)
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)

    assert job.returncode == 75, said
    assert {path.name for path in (tmp_path / "r").glob("saved-?")} == {"saved-0", "saved-1"}


@pytest.mark.parametrize("ranks", ["", "0", "x", "-1"])
def test_ranks_are_a_number(python: Path, ranks: str) -> None:
    job = start(python, ranks)
    _, said = job.communicate(timeout=LONGEST_SECONDS)

    assert job.returncode == 78
    assert said.startswith(
        f"axsparse: error: ranks: '{ranks}' is no whole number of at least 1; see the head of "
    )
