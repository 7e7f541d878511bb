"""Runs jobs in several processes and returns their results in order.

No worker process outlives the process that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from axsparse.runtime.errors import TrainingError

Job = TypeVar("Job")
Result = TypeVar("Result")
AHEAD = 4
"""Jobs for each worker that are handed out before the first result is taken."""


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """The results of all jobs, in the order of the jobs.

    A single worker is this process itself. Raises what `work` raises, and TrainingError if a
    worker is killed.
    """
    if workers == 1:
        yield from map(work, jobs)
        return
    pool = _pool(workers)
    waiting: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) >= workers * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise TrainingError(
            f"--workers: one of {workers} processes was killed, perhaps for want of memory; "
            "choose fewer and start again, finished parts are kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def apart(work: Callable[[Job], Result], job: Job) -> Result:
    """The result of one job, done in a process of its own; raises as `in_order` does."""
    pool = _pool(1)
    try:
        return pool.submit(work, job).result()
    except BrokenProcessPool:
        raise TrainingError(
            "--train-bpe: the process that learns was killed, perhaps for want of memory; choose "
            "a smaller --bpe-sample-mb"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    # New interpreters, since a forked one inherits locks of threads that it does not have.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)


def _begin() -> None:
    # Ctrl-C reaches every process of a terminal; only the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
