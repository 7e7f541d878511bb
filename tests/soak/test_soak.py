"""Some cycles of `make soak` and of restarting.py, so that they still do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, TESTS

TINY = """\
model: {name: gpt, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 32,
        vocab_size: 256}
data: {source: stdlib}
batch: {global_batch_size: 12, microbatch_size: 1}
precision: fp32
train: {eval_every: 20, eval_steps: 1}
"""


@pytest.mark.exhaustive
def test_a_run_outlives_some_hosts(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [sys.executable, str(TESTS / "soak" / "restarting.py"), "--events", "2"]
    words = ["--config", str(tmp_path / "tiny.yaml"), "--hosts", "2", "--steps", "60"]

    done = subprocess.run(
        [*command, *words, "--seed", "4"],
        env={**os.environ, **ENVIRONMENT, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * LONGEST_SECONDS,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nthe same: 63 records and 3 checkpoints (steps 50, 55, 60); " in done.stdout
    assert " of step-60 are equal in every byte\n" in done.stdout
    assert list(tmp_path.glob("restarting-*")) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cycles", "words"), [(5, []), (10, ["--mixed"])], ids=["", "mixed"])
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
