"""`axsparse launch`, which hands over to the script of `launch/` wherever that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS


def launch(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "axsparse", "launch", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )


def test_ranks_are_started_with_the_options_of_training(tmp_path: Path) -> None:
    done = launch(tmp_path, "2", "--config", "a b.yaml", MPIRUN="echo started", PYTHON="py")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "started -n 2 py -m axsparse.train --config a b.yaml --resume auto\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "axsparse: error: the following arguments are required: RANKS"),
        (["some"], "axsparse: error: ranks: 'some' is no whole number of at least 1; see the head"),
    ],
)
def test_mistakes_are_one_line(words: list[str], line: str, tmp_path: Path) -> None:
    done = launch(tmp_path, *words)

    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_without_bash_it_says_so(tmp_path: Path) -> None:
    done = launch(tmp_path, "2", PATH=str(tmp_path))

    assert done.returncode == 66
    assert "launch: no bash, which mpirun.sh is written for; install it" in done.stderr
