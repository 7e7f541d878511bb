"""A gradient that is not a number on one rank, on real ranks: skipped by all, or the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.mpirun import TESTS, Finished, run_mpirun


def train(run_dir: Path, fault: str) -> Finished:
    script = str(TESTS / "faults" / "breaking.py")
    return run_mpirun(2, [script, str(run_dir), "1x2", "12", fault])


@pytest.mark.fault(15)
def test_a_nan_on_one_rank_is_skipped_by_all_and_replicas_stay_equal(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "nan:4")

    assert done.returncode == 0, str(done)
    what = "rank 1 (stage 0, replica 1): the gradient of hidden2.0.weight is not finite"
    assert f"step 5: {what}; no rank updated its weights" in done.stdout
    assert "of 12 steps: 1 skipped with numbers that were not finite" in done.stdout
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if "loss" in record]
    assert [record["skip_reason"] for record in steps] == [None] * 4 + [what] + [None] * 7
    one, other = ((tmp_path / "run" / f"weights-{rank}").read_text() for rank in range(2))
    assert one == other != ""


@pytest.mark.fault(15)
def test_nans_that_stay_end_the_run_and_name_rank_parameter_and_first_step(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "nans:1")

    assert done.returncode == 70, str(done)
    assert done.errors == [
        "axsparse: error: step 2: rank 1 (stage 0, replica 1): the gradient of hidden2.0.weight is "
        "not finite, and no step could update for 10 in a row, up to step 11 "
        "(loss_scale.patience); lower optimizer.learning_rate, or look at the data"
    ]
