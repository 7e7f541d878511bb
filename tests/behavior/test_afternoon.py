"""The example that goes all the way: own model, pruned, four ranks, curves, back in plain torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.mpirun import run_mpirun

EXAMPLE = Path(__file__).parents[2] / "examples" / "afternoon.py"
SHORT = ("train.steps=12", "pruning.at_step=4", "train.eval_every=4", "schedule.warmup_steps=2")


def reported(ranks: int, steps: tuple[str, ...], folder: Path) -> float:
    """Run the example, which holds the accuracy against plain torch itself; what it reported."""
    done = run_mpirun(ranks, [str(EXAMPLE), *steps, "run_dir=run"], cwd=folder)
    assert done.returncode == 0, done
    found = re.search(r"accuracy reported (\S+), in plain torch (\S+)\n", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
    assert f"top1 {100 * float(found[1]):.2f} %" in done.stdout
    assert "90 % of the convolutions are zero" in done.stdout
    assert (folder / "run" / "report.html").stat().st_size > 20_000
    return float(found[1])


@pytest.mark.exhaustive
def test_the_accuracy_in_plain_torch_is_the_one_that_was_reported(tmp_path: Path) -> None:
    assert reported(2, SHORT, tmp_path) > 0.1


@pytest.mark.exhaustive
def test_the_whole_afternoon_ends_with_an_accurate_model(tmp_path: Path) -> None:
    assert reported(4, (), tmp_path) > 0.97
