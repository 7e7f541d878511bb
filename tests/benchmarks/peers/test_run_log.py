"""A comparison that was cut off goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from peers.launch import Failure
from peers.run_log import RunLog
from peers.workload import DDP, SIZES, Run

RUN = Run(DDP, SIZES["tiny"], "bf16", 3, 1)


def test_finished_runs_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    RunLog(path, "a").put(RUN, 0, {"median_seconds": 1.0}, 5.0)
    RunLog(path, "a").put(RUN, 1, Failure("process 0 ended with 1", "bad_alloc"), 5.0)

    log = RunLog(path, "a")

    assert log.get(RUN, 0) == {"median_seconds": 1.0}
    failure = log.get(RUN, 1)
    assert isinstance(failure, Failure)
    assert failure.is_memory
    assert log.get(RUN, 2) is None
    assert log.seconds(RUN) == 5.0


def test_other_code_and_other_settings_are_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    RunLog(path, "a").put(RUN, 0, {"median_seconds": 1.0}, 5.0)

    assert RunLog(path, "b").get(RUN, 0) is None
    assert RunLog(path, "a").get(replace(RUN, steps=4), 0) is None


def test_a_line_that_was_cut_off_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    RunLog(path, "a").put(RUN, 0, {"median_seconds": 1.0}, 5.0)
    path.write_text(path.read_text() + '\n{"code": "a", "run')
    RunLog(path, "a").put(RUN, 1, {"median_seconds": 2.0}, 5.0)

    log = RunLog(path, "a")

    assert log.get(RUN, 0) == {"median_seconds": 1.0}
    assert log.get(RUN, 1) == {"median_seconds": 2.0}
