"""Starts `tests/mpi` on real MPI ranks, once a number of ranks."""

from __future__ import annotations

import re

import pytest
from support.exhaustive import by_default
from support.mpirun import LONGEST_SECONDS, TESTS, run_mpirun

PYTEST = (
    # Both -m mpi4py and -x: else one rank that fails leaves the others waiting.
    *("-m", "mpi4py", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
    # Before the limit, so that a rank that hangs says where.
    *("-o", "faulthandler_timeout=240"),
)


USUAL = (2, "not exhaustive", ".")
OF_USERS = [(1, "not exhaustive", f"test_user_{what}_mpi.py") for what in ("modules", "runs")]


@pytest.mark.parametrize(
    ("ranks", "which", "where"),
    by_default(
        [USUAL],
        [USUAL, (2, "exhaustive", "."), (4, "exhaustive or not exhaustive", "."), *OF_USERS],
    ),
)
def test_the_mpi_tests_pass_on_every_rank(ranks: int, which: str, where: str) -> None:
    words = [*PYTEST, "-m", which, str(TESTS / "mpi" / where)]
    job = run_mpirun(ranks, words, timeout=4 * LONGEST_SECONDS, cwd=TESTS.parent)

    assert job.returncode == 0, str(job)
    passed = re.findall(r"(\d+) passed", job.stdout)
    assert len(passed) == ranks and len(set(passed)) == 1, str(job)
    assert int(passed[0]) > 0, str(job)
