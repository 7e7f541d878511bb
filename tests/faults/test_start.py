"""Ranks that end before MPI has started: the others must not wait for them for ever."""

from __future__ import annotations

import sys
from pathlib import Path

from support.mpirun import run_mpirun

WAITS_A_MOMENT = """
import os, sys
from axsparse.runtime import connection, launcher
from axsparse.runtime.mpi import mpi_transport
if any(os.environ.get(name) == "1" for name in launcher.LAUNCHER_VARIABLES):
    os._exit(3)
mpi_transport.START_SECONDS = 3.0
connection.connect()
"""


def test_a_host_that_lacks_a_package_ends_the_job_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ImportError('no such library here')\n")
    words = ["-m", "axsparse.train", "--config", "quickstart.yaml"]
    other = ["env", f"PYTHONPATH={tmp_path}", sys.executable, *words]

    done = run_mpirun(1, [*words, ":", "-n", "1", *other], python=sys.executable)

    assert done.returncode == 70, str(done)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("axsparse: error:")]
    assert line.startswith("axsparse: error: host ")
    assert line.endswith(": ImportError: no such library here")


def test_a_rank_that_is_gone_before_mpi_starts_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(WAITS_A_MOMENT)

    done = run_mpirun(2, [str(script)])

    assert done.returncode > 0, str(done)
    # Open MPI's launcher ends the others by itself.
    assert "wait_until_all_ranks_have_started" in done.stderr or "Exit code:    3" in done.stderr
