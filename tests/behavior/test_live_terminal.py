"""A training of two ranks under mpirun in a pseudo-terminal that becomes narrower in mid-run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, mpirun_path
from support.terminal import Terminal

STEPS = 40


def watched(terminal: Terminal, run: Path, **environment: str) -> tuple[list[list[str]], list[str]]:
    """Train in the terminal, which narrows from 100 to 60 columns after ten steps.

    Returns what the screen showed again and again, and what it shows in the end.
    """
    command = [mpirun_path(), "-n", "2", sys.executable, "-m", "axsparse.train"]
    command += [
        "--config",
        "digits_cnn.yaml",
        "--steps",
        str(STEPS),
        "--run-dir",
        str(run),
        "--set",
        "pruning.at_step=0",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, **ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "1", **environment},
        start_new_session=True,
    )
    pictures: list[list[str]] = []
    deadline = time.monotonic() + LONGEST_SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline
        pictures.append(list(terminal.read()))
        metrics = run / "metrics.jsonl"
        steps = metrics.read_text().count('"loss"') if metrics.exists() else 0
        if steps >= 10 and terminal.screen.columns == 100:
            terminal.resize(60)
        time.sleep(0.05)
    assert process.returncode == 0, terminal.read()
    return pictures, terminal.read()


@pytest.mark.exhaustive
@pytest.mark.parametrize("folds_anew", [True, False])
def test_what_mpirun_copies_stays_clean_while_the_terminal_narrows(
    folds_anew: bool, tmp_path: Path
) -> None:
    terminal = Terminal(100, folds_anew=folds_anew)
    try:
        pictures, end = watched(terminal, tmp_path / "run")
    finally:
        terminal.close()

    text = "".join(end)
    assert "saved in" in text
    assert "slowest rank" not in text  # the live rows are gone
    for picture in pictures:
        assert sum("slowest rank" in row for row in picture) <= 1, picture
    widths = [max(map(len, p[-4:])) for p in pictures if any("slowest rank" in row for row in p)]
    assert max(widths) > 60 > widths[-1]


@pytest.mark.exhaustive
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    terminal = Terminal(100)
    try:
        pictures, end = watched(terminal, tmp_path / "run", TERM="dumb")
    finally:
        terminal.close()

    assert any(row.startswith(f"step {STEPS}/{STEPS}  loss") for row in end)
    assert not any("█" in row or "slowest" in row for picture in pictures for row in picture)
