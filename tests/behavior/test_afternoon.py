"""The example that goes all the way: own model, pruned, four ranks, curves, back in plain torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.mpirun import run_mpirun

EXAMPLE = Path(__file__).parents[2] / "examples" / "afternoon.py"


@pytest.mark.exhaustive
def test_the_whole_afternoon_ends_with_an_accurate_model_also_in_plain_torch(
    tmp_path: Path,
) -> None:
    """The example itself compares the accuracy that was reported with plain torch."""
    done = run_mpirun(4, [str(EXAMPLE), "run_dir=run", "layout.g_inter=2"], cwd=tmp_path)

    assert done.returncode == 0, done
    found = re.search(r"accuracy reported (\S+), in plain torch (\S+)\n", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
    assert f"top1 {100 * float(found[1]):.2f} %" in done.stdout
    assert "90 % of the convolutions are zero" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 20_000
    assert float(found[1]) > 0.97
