"""Reads batches in a thread, ahead of the steps that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from axsparse.data.batches import Batch

AHEAD = 3
"""Batches that are read or wait in memory, in addition to the one requested last."""


class Prefetcher:
    """The batches of consecutive steps, read ahead by a thread.

    With an `end`, only the steps below it are read. The thread lives until `close`, or the end of a
    `with` block.
    """

    def __init__(
        self, read: Callable[[int], Batch], first_step: int, end: int | None = None
    ) -> None:
        self._read = read
        self._next_step = first_step
        self._end = end
        self._coming: deque[Future[Batch]] = deque()
        self._thread = ThreadPoolExecutor(1, "axsparse-prefetch")
        self._read_ahead()

    def get(self, step: int) -> Batch:
        """The batch of a step, waited for if necessary; steps must be requested in order.

        If `read` raised an exception for this step, the same object is raised here.
        """
        assert step == self._next_step, f"step {step} asked for, {self._next_step} comes next"
        assert self._coming, f"closed, or step {step} is the end"
        batch = self._coming.popleft().result()
        self._next_step += 1
        self._read_ahead()
        return batch

    def close(self) -> None:
        """End the thread, after the read that it is busy with; safe to call twice."""
        self._coming.clear()
        self._thread.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        while len(self._coming) < AHEAD:
            step = self._next_step + len(self._coming)
            if self._end is not None and step >= self._end:
                return
            self._coming.append(self._thread.submit(self._read, step))

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
