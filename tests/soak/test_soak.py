"""Some cycles of `make soak`, so that it still does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, TESTS


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cycles", "words"), [(4, []), (6, ["--mixed"])], ids=["", "mixed"])
def test_a_training_outlives_some_kills(cycles: int, words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "soak" / "killing.py"), "--cycles", str(cycles)]

    done = subprocess.run(
        [*command, "--seed", "3", *words],
        env={**os.environ, **ENVIRONMENT, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 3, in ")
    assert " replicas: the same: 60 records and 2 checkpoints" in done.stdout
    assert f"\n{cycles} cycles in " in done.stdout
    assert list(tmp_path.glob("soak-*")) == []
