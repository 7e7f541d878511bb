"""Trainings in a pseudo-terminal that changes its size in mid-run, and jobs that Ctrl-C ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, mpirun_path
from support.terminal import Terminal

from axsparse.runtime.shared_segments import SHARED

STEPS = 120
SMALL = """\
model: {num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 64}
batch: {global_batch_size: 16, microbatch_size: 8}
pruning: {sparsity: 0.9}
train: {eval_every: 40, eval_steps: 2}
"""
BAR = "░"
"""In the row with the bar, and nowhere else."""


def watched(
    terminal: Terminal, run: Path, becomes: tuple[int, int]
) -> tuple[list[list[str]], list[str], int]:
    """Train in the terminal, which has other columns and lines after ten steps and a bar.

    Returns what the screen showed again and again, what it shows in the end, and the exit code.
    """
    (run.parent / "small.yaml").write_text(SMALL)
    command = [sys.executable, "-m", "axsparse.train", "--config", "small.yaml"]
    command += ["--steps", str(STEPS), "--run-dir", str(run), "--set", "pruning.at_step=0"]
    # These would come before the size that the terminal has; processes of pytest-xdist have them.
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command,
        cwd=run.parent,
        stdin=subprocess.DEVNULL,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**inherited, **ENVIRONMENT, "TERM": "xterm"},
        start_new_session=True,
    )
    pictures: list[list[str]] = []
    begins, has_bar = terminal.screen.columns, False
    deadline = time.monotonic() + LONGEST_SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline
        pictures.append(list(terminal.read()))
        metrics = run / "metrics.jsonl"
        steps = metrics.read_text().count('"loss"') if metrics.exists() else 0
        has_bar = has_bar or any(BAR in row for row in pictures[-1])
        if steps >= 10 and has_bar and terminal.screen.columns == begins:
            terminal.resize(*becomes)
        time.sleep(0.05)
    return pictures, terminal.read(), process.returncode


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("begins", "becomes", "folds_anew"), [(100, (60, 24), False), (60, (100, 6), True)]
)
def test_the_screen_stays_clean_while_the_terminal_changes(
    begins: int, becomes: tuple[int, int], folds_anew: bool, tmp_path: Path
) -> None:
    terminal = Terminal(begins, folds_anew=folds_anew)
    try:
        pictures, end, code = watched(terminal, tmp_path / "run", becomes)
    finally:
        terminal.close()

    text = "".join(end)
    assert code == 0, text
    assert "saved in" in text
    assert BAR not in text  # it is gone
    for picture in pictures:
        assert sum(BAR in row for row in picture) <= 1, picture
    bars = [row for picture in pictures for row in picture if BAR in row]
    lengths = [row.count("█") + row.count(BAR) for row in bars]
    assert (lengths[0], lengths[-1]) == (min(24, begins // 4), min(24, becomes[0] // 4))
    assert len(bars[-1]) < becomes[0]  # a longer row is cut, not folded


# -- Ctrl-C, which the launcher passes on, and what ranks map ------------------------------------

TRAIN = (
    *("-m", "axsparse.train", "--config", "quickstart.yaml", "--steps", "100000"),
    *("--set", "model.hidden_size=32", "--set", "model.num_layers=2"),
)


@pytest.mark.exhaustive
def test_ctrl_c_saves_says_so_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    with (tmp_path / "errors").open("w") as errors:
        job = subprocess.Popen(
            [mpirun_path(), "-n", "2", sys.executable, *TRAIN, "--run-dir", str(run)],
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
            assert mapped

            os.killpg(job.pid, signal.SIGINT)

            assert job.wait(LONGEST_SECONDS) == 75
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()

    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    ours = [
        line
        for line in (tmp_path / "errors").read_text().splitlines()
        if line.startswith("axsparse: ")
    ]
    assert ours == [
        "axsparse: stops after the step under way and saves; Ctrl-C once more leaves at once",
        f"axsparse: stopped after step {steps[-1]}, saved in {run}/checkpoints; --resume auto goes "
        "on",
    ]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps[-1]}"]
    assert not any(Path(name).exists() for name in mapped)


def maps_of(run: Path) -> list[str]:
    """The memory maps of the ranks of a run; launchers start them in separate sessions."""
    lines: list[str] = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may have ended
            if str(run) in (process / "cmdline").read_text():
                lines += (process / "maps").read_text().splitlines()
    return lines
