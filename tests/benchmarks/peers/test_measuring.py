"""Runs that are done, are known already, or would take longer than there is time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from peers import measuring
from peers.measuring import Measuring, TimeIsUp
from peers.run_log import RunLog
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
