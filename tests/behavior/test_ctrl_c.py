"""Jobs that Ctrl-C ends, which the launcher passes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, mpirun_path, ranks_of, shared_memory
from support.resuming import records_of

from axsparse.runtime.files.run_folder import RESUME_AUTO

TRAIN = (
    *("-m", "axsparse.train", "--config", "quickstart.yaml"),
    *("--set", "model.hidden_size=32", "--set", "model.num_layers=2"),
)


@pytest.mark.exhaustive
def test_ctrl_c_saves_says_so_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = (mpirun_path(), "-n", "2", sys.executable, *TRAIN, "--steps", "100000")
    code, mapped = interrupted(command, tmp_path)
    run = tmp_path / "run"

    assert code == 75
    assert mapped
    last = records_of(run)[-1]["step"]
    ours = [
        line
        for line in (tmp_path / "errors").read_text().splitlines()
        if line.startswith("axsparse: ")
    ]
    assert ours == [
        "axsparse: stops after the step under way and saves; Ctrl-C once more leaves at once",
        f"axsparse: stopped after step {last}, saved in {run}/checkpoints; {RESUME_AUTO} goes on",
    ]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last}"]
    assert not any(path.exists() for path in mapped)


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
    command: Sequence[str], folder: Path, number: int = signal.SIGINT, *, of_launcher: bool = True
) -> tuple[int, set[Path]]:
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
            ranks = [*ranks_of(run)]
            mapped = set[Path]().union(*map(shared_memory, ranks))
            if of_launcher:
                os.killpg(job.pid, number)
            else:
                os.kill(max(ranks), number)
            return job.wait(LONGEST_SECONDS), mapped
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
