"""What ranks measured is joined, and ranks that hang are noticed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from peers import launch
from peers.launch import Failure, Stall, cpu_seconds, join
from peers.workload import DDP, SIZES, Run

RUN = Run(DDP, SIZES["tiny"], "bf16", steps=2, warmup=1)


def row(ends: list[float], losses: list[list[float]]) -> dict[str, object]:
    return {
        "ends": ends,
        "cpu": [1.0, 2.0, 3.0],
        "machine": [10.0, 20.0, 30.0],
        "losses": losses,
        "peak": 5,
        "before": 2,
        "tokens": "0",
        "torch": "2",
    }


def test_a_step_ends_when_it_has_ended_on_the_last_rank() -> None:
    found = join(
        RUN,
        [
            row([1.0, 2.0, 5.0], [[9.0], [8.0], [7.0]]),
            row([1.5, 3.0, 4.0], [[9.0], [8.0], [6.0]]),
        ],
    )

    assert found["seconds"] == [1.5, 2.0]  # 1.5 to 3.0 to 5.0
    assert found["cpu_seconds"] == 2.0
    assert found["losses"] == [9.0, 8.0, 6.5]
    assert found["peak_bytes_above_libraries"] == [3, 3]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that waits for its input, with no CPU time."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as started:
        yield started
        started.kill()


def test_ranks_that_wait_for_ever_count_as_hung(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    while not cpu_seconds({process.pid}):
        pass
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.0)
    stall = Stall([process])
    assert not stall.is_there()

    moment = time.monotonic() + launch.STALL_SECONDS + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)

    assert stall.is_there()


def test_what_says_that_memory_is_missing_is_told_from_other_failures() -> None:
    assert Failure("process 0 ended with 1", "RuntimeError: can't allocate memory: you").is_memory
    assert not Failure("process 0 ended with 1", "KeyError: 'x'").is_memory
