"""The examples that are programs: a custom model on any ranks, and one that goes all the way."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from support.exhaustive import by_default
from support.mpirun import run_alone, run_mpirun
from support.page_blocks import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("ranks", by_default([1], [1, 4]))
def test_the_example_trains(ranks: int, tmp_path: Path) -> None:
    """One rank needs no mpirun."""
    start = run_alone if ranks == 1 else partial(run_mpirun, ranks)
    done = start([str(EXAMPLES / "custom_model.py")], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert ranks > 1 or "1 rank = 1 stage × 1 replica" in done.stdout
    final = [line for line in done.stdout.splitlines() if "step 60/60  validation loss" in line]
    assert float(final[0].split()[4]) < 1.3 < 1.386  # ln 4: guessing


@pytest.mark.exhaustive
def test_the_whole_afternoon_ends_with_an_accurate_model_also_in_plain_torch(
    tmp_path: Path,
) -> None:
    """The example itself compares the accuracy that was reported with plain torch."""
    done = run_mpirun(
        4, [str(EXAMPLES / "afternoon.py"), "run_dir=run", "layout.g_inter=2"], cwd=tmp_path
    )

    assert done.returncode == 0, done
    found = re.search(r"accuracy reported (\S+), in plain torch (\S+)\n", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
    assert f"top1 {100 * float(found[1]):.2f} %" in done.stdout
    assert "90 % of the convolutions are zero" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 20_000
    assert float(found[1]) > 0.97
