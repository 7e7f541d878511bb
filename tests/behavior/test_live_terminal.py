"""Trainings in a pseudo-terminal that changes its size in mid-run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS
from support.terminal import Terminal

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
