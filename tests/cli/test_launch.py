"""`axsparse launch`, which hands over to the script of `launch/` wherever that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.mpirun import LONGEST_SECONDS


def launch(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, screen and errors of the command, which becomes another one."""
    done = subprocess.run(
        [sys.executable, "-m", "axsparse", "launch", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_ranks_are_started_with_the_options_of_training(tmp_path: Path) -> None:
    started = launch(tmp_path, "2", "--config", "a b.yaml", MPIRUN="echo started", PYTHON="py")

    line = "started -n 2 py -m axsparse.train --config a b.yaml --resume auto\n"
    assert started == (0, line, "")


def test_mistakes_are_one_line(
    tmp_path: Path, axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_line(axsparse("launch"), 78, "the following arguments are required: RANKS")
    odd = "ranks: 'some' is no whole number of at least 1; see the head"
    assert_one_line(launch(tmp_path, "some"), 78, odd)
    monkeypatch.setenv("PATH", str(tmp_path))
    lacking = "launch: no bash, which mpirun.sh is written for; install it"
    assert_one_line(axsparse("launch", "2"), 66, lacking)
