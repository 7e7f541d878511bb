"""Jobs that Ctrl-C ends, which the launcher passes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, mpirun_path

from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.runtime.shared_segments import SHARED

TRAIN = (
    *("-m", "axsparse.train", "--config", "quickstart.yaml"),
    *("--set", "model.hidden_size=32", "--set", "model.num_layers=2"),
)


@pytest.mark.exhaustive
def test_ctrl_c_saves_says_so_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = (mpirun_path(), "-n", "2", sys.executable, *TRAIN, "--steps", "100000")
    code, mapped = interrupted(command, tmp_path)
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"

    assert code == 75
    assert mapped
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    ours = [
        line
        for line in (tmp_path / "errors").read_text().splitlines()
        if line.startswith("axsparse: ")
    ]
    assert ours == [
        "axsparse: stops after the step under way and saves; Ctrl-C once more leaves at once",
        f"axsparse: stopped after step {steps[-1]}, saved in {run}/checkpoints; {RESUME_AUTO} goes "
        "on",
    ]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps[-1]}"]
    assert not any(Path(name).exists() for name in mapped)


@pytest.mark.exhaustive
def test_a_job_in_the_background_of_a_script_keeps_ctrl_c_ignored(tmp_path: Path) -> None:
    train = (*TRAIN, "--set", "layout.g_inter=1", "--steps", "20")
    command = ("sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, *train)

    assert interrupted(command, tmp_path)[0] == 0

    assert (tmp_path / "run" / "checkpoints" / "step-20").is_dir()


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_that_closes_has_the_run_saved(ranks: int, tmp_path: Path) -> None:
    """Without a launcher all get the signal, under one the ranks that it passes it to."""
    train = (sys.executable, *TRAIN, "--steps", "100000", "--set", f"layout.g_inter={ranks}")
    command = train if ranks == 1 else (mpirun_path(), "-n", str(ranks), *train)

    code, _ = interrupted(command, tmp_path, signal.SIGHUP, of_launcher=ranks == 1)

    assert code == 75
    said = (tmp_path / "errors").read_text()
    assert said.count("axsparse: stopped after step ") == said.count("\n") == 1, said
    assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) == 1


def interrupted(
    command: Sequence[str],
    folder: Path,
    number: int = signal.SIGINT,
    *,
    of_launcher: bool = True,
) -> tuple[int, set[str]]:
    """The exit code of a training in folder/run that a signal reaches after a step, and the shared
    memory that its ranks had mapped."""
    run = folder / "run"
    metrics = run / "metrics.jsonl"
    with (folder / "errors").open("w") as errors:
        job = subprocess.Popen(
            [*command, "--run-dir", str(run)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        try:
            until = time.monotonic() + LONGEST_SECONDS
            while not (metrics.exists() and metrics.stat().st_size):
                assert job.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            mapped = {line.split()[-1] for line in maps_of(run) if str(SHARED) in line}
            if of_launcher:
                os.killpg(job.pid, number)
            else:
                os.kill(max(ranks_of(run) - {job.pid}), number)
            return job.wait(LONGEST_SECONDS), mapped
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def maps_of(run: Path) -> list[str]:
    """The memory maps of the ranks of a run."""
    lines: list[str] = []
    for number in ranks_of(run):
        with contextlib.suppress(OSError):  # it may have ended
            lines += Path(f"/proc/{number}/maps").read_text().splitlines()
    return lines


def ranks_of(run: Path) -> set[int]:
    """The processes of a run; launchers start them in separate sessions."""
    numbers = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if str(run) in (process / "cmdline").read_text():
                numbers.add(int(process.name))
    return numbers
