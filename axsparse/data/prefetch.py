"""Reads batches in a thread, ahead of the steps that need them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, Queue

from axsparse.data.batches import Batch


class Prefetcher:
    """The batches of consecutive steps, read ahead by a thread.

    Up to `depth` batches wait in memory while one more is being read. With an `end`, only the
    steps below it are read. The thread lives until `close`, or the end of a `with` block.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        first_step: int,
        depth: int = 2,
        end: int | None = None,
    ) -> None:
        # A queue of size 0 has no bound: it would take in the whole data set.
        assert depth >= 1, f"depth {depth} must be at least 1"
        self._read = read
        self._next_step = first_step
        self._end = end
        self._queue: Queue[Batch | BaseException] = Queue(depth)
        self._closed = threading.Event()
        # A daemon thread, so that a read that hangs does not keep a failed job alive.
        self._thread = threading.Thread(
            target=self._run, args=(first_step,), name="axsparse-prefetch", daemon=True
        )
        self._thread.start()

    def get(self, step: int) -> Batch:
        """The batch of a step, waited for if necessary; steps must be requested in order.

        If `read` raised an exception for this step, the same object is raised here, and the
        thread ends.
        """
        assert step == self._next_step, f"step {step} asked for, {self._next_step} comes next"
        assert not self._closed.is_set(), "closed"
        assert step != self._end, f"step {step} is the end"
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._next_step += 1
        return item

    def close(self) -> None:
        """End the thread, after the read that it is busy with."""
        self._closed.set()
        # The thread may be waiting because the queue is full. Once emptied, the queue has room
        # for the one item that can still come.
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            self._thread.join()

    def _run(self, step: int) -> None:
        while not self._closed.is_set() and step != self._end:
            try:
                item = self._read(step)
            except BaseException as error:
                # Exceptions of every class are passed on: `get` would wait forever for a lost one.
                self._queue.put(error)
                return
            self._queue.put(item)
            step += 1

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
