"""Runs that are done are known, and those that would take too long are left for another time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peers import measuring
from peers.launch import Failure
from peers.measuring import Measuring, RunLog, TimeIsUp
from peers.workload import PLAIN, SIZES, Run

RUN = Run(PLAIN, SIZES["tiny"], "fp32", steps=2, warmup=1)
RESULT: dict[str, Any] = {"median_seconds": 1.0, "foreign_share": 0.0}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    runs: list[Run] = []

    def launch(run: Run, timeout: float) -> dict[str, Any]:
        assert timeout == 9.0
        runs.append(run)
        return RESULT

    monkeypatch.setattr(measuring, "launch", launch)
    return runs


def with_deadline(folder: Path, seconds: float) -> Measuring:
    log = RunLog(folder / "runs.jsonl", "code")
    return Measuring(log, 9.0, 0.05, retries=0, deadline=time.monotonic() + seconds)


def test_a_run_that_would_end_too_late_is_left_for_another_time(
    launched: list[Run], tmp_path: Path
) -> None:
    short = with_deadline(tmp_path, 5.0)
    short.plan([(RUN, 0)])

    with pytest.raises(TimeIsUp):
        short.result(RUN, 0)

    assert launched == []
    assert short.minutes > 0


def test_what_is_known_needs_no_time(launched: list[Run], tmp_path: Path) -> None:
    with_deadline(tmp_path, 600.0).result(RUN, 0)

    assert with_deadline(tmp_path, 0.0).result(RUN, 0) == RESULT
    assert launched == [RUN]


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
