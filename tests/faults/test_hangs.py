"""A rank that gets stuck, on real ranks: one report that names it, and the job ends with 70."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mpirun import TESTS, Finished, run_mpirun

from axsparse.observe.watchdog.heartbeat import HEARTBEATS
from axsparse.observe.watchdog.watchdog import REPORT_FILE
from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.runtime.grid import Grid

STOPPED = ": its process is stopped by a signal; "
READS = [" in data of step 3, no progress for ", "; rank 1 awaits its activation 0 in step 3; "]


def train(run_dir: Path, grid: Grid, fault: str) -> Finished:
    layout = f"{grid.g_inter}x{grid.g_data}"
    words = [str(TESTS / "faults" / "breaking.py"), str(run_dir), layout, "12", fault]
    return run_mpirun(grid.size, words)


@pytest.mark.fault(17)
@pytest.mark.launcher
@pytest.mark.parametrize(
    ("grid", "fault", "rank", "what"),
    [
        (Grid(2, 2), "stop:3", 1, [STOPPED, "; rank 0 awaits its gradient 0 in step 3; "]),
        (Grid(1, 2), "stop-save:2", 0, [STOPPED]),
        (Grid(2, 1), "data:3", 0, READS),
    ],
    ids=["stopped", "stopped while it saves", "reads for ever"],
)
def test_a_rank_that_gets_stuck_is_named_and_ends_the_job(
    tmp_path: Path, grid: Grid, fault: str, rank: int, what: list[str]
) -> None:
    run = tmp_path / "run"

    done = train(run, grid, fault)

    assert done.returncode == 70, str(done)
    (line,) = done.errors
    assert line.startswith(f"axsparse: error: {grid.coords(rank)}: hangs"), str(done)
    assert all(part in line for part in what), line
    assert f"the stacks of all ranks are in {run / REPORT_FILE}; {RESUME_AUTO} goes on" in line
    report = (run / REPORT_FILE).read_text()
    assert line == f"axsparse: error: {report.splitlines()[0]}"
    told = report.count("\nthread MainThread:") + report.count("\nno stacks: it did not answer")
    assert told == grid.size, report
    assert ("in never_end" in report) == (fault == "data:3")


@pytest.mark.fault(17)
def test_a_slow_rank_is_warned_of_with_its_ratio_and_a_long_first_step_is_no_hang(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"

    done = train(run, Grid(1, 3), "slow:1")

    assert done.returncode == 0, str(done)
    (line,) = [line for line in done.stdout.splitlines() if "warning" in line]
    assert line.startswith("warning: rank 2 (stage 0, replica 2) on host "), str(done)
    assert "times as long as the other replicas of its stage" in line
    assert not (run / HEARTBEATS).exists()
    assert not (run / REPORT_FILE).exists()
