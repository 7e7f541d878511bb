"""Jobs in several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axsparse.data.prepare.processes import apart, in_order
from axsparse.runtime.errors import DataError, TrainingError


def slow_first(number: int) -> tuple[int, int]:
    time.sleep(0.3 if number == 0 else 0)
    return number, os.getpid()


def refuse(number: int) -> int:
    if number == 2:
        raise DataError("the third is bad")
    return number


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs(workers: int) -> None:
    results = list(in_order(slow_first, range(12), workers))

    assert [number for number, _ in results] == list(range(12))
    assert (os.getpid() in {process for _, process in results}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_worker_raises_is_raised(workers: int) -> None:
    with pytest.raises(DataError, match=r"^the third is bad$"):
        list(in_order(refuse, range(9), workers))


def test_a_worker_that_is_killed_ends_the_run() -> None:
    with pytest.raises(TrainingError, match="one of 2 processes was killed, perhaps for want"):
        list(in_order(die, range(9), 2))
    with pytest.raises(TrainingError, match="the process that learns was killed, perhaps for"):
        apart(die, 0)


ORPHANS = """
import os, signal, sys, time
from axsparse.data.prepare.processes import in_order
def work(number):
    print(os.getpid(), flush=True)
    time.sleep(20)
    print('outlived', flush=True)
if __name__ == "__main__":
    list(in_order(work, range(2), 2))
"""


def test_no_worker_outlives_a_killed_run(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    assert all(Path(f"/proc/{worker}").exists() for worker in workers)

    process.kill()

    # The pipe ends when no process holds it any more.
    assert process.stdout.readline() == ""
    process.wait()
    process.stdout.close()
