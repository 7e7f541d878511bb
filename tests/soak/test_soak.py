"""Some cycles of `make soak`, so that it still does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, TESTS


@pytest.mark.exhaustive
def test_a_training_outlives_some_kills(tmp_path: Path) -> None:
    words = ["--cycles", "20", "--seed", "7", "--mixed"]
    command = [sys.executable, str(TESTS / "soak" / "killing.py"), *words]

    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 3, in ")
    assert "\n5 cycles in " in done.stdout
    assert list(tmp_path.iterdir()) == []
