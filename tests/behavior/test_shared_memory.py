"""A job that fails leaves no shared memory of its own on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mpirun import run_mpirun

from axsparse.runtime.shared_segments import SHARED

ENDS_ALL = """
import sys
from pathlib import Path
from axsparse.runtime.connection import connect
from axsparse.runtime.shared_segments import SEGMENTS

transport = connect()
for line in Path("/proc/self/maps").read_text().splitlines():
    path = Path(line.split(maxsplit=5)[-1])
    if SEGMENTS.match(path.name):
        print("maps", path, flush=True)
transport.abort(3)
"""


@pytest.mark.skipif(not SHARED.is_dir(), reason="this system has no /dev/shm")
def test_a_job_that_ends_all_ranks_removes_what_its_ranks_map() -> None:
    job = run_mpirun(2, ["-c", ENDS_ALL])

    lines = [line for line in job.stdout.splitlines() if line.startswith("maps ")]
    assert job.returncode == 3, str(job)
    assert lines, str(job)
    assert [line for line in lines if Path(line.split()[1]).exists()] == [], str(job)
