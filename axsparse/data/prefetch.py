"""Reads batches ahead of the step that needs them, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, Queue
from types import TracebackType

from axsparse.data.batches import Batch


class Prefetcher:
    """Batches of consecutive steps; up to `depth` wait, while one more is being read.

    Use it as a context manager, or `close` it: the thread lives until then. With an `end`
    it reads the steps below that.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        first_step: int,
        depth: int = 2,
        end: int | None = None,
    ) -> None:
        # Without a bound the queue would hold the whole data set.
        assert depth >= 1, f"depth {depth} must be at least 1"
        self._read = read
        self._next_step = first_step
        self._end = end
        self._queue: Queue[Batch | BaseException] = Queue(depth)
        self._closed = threading.Event()
        # A daemon, so that a read that hangs cannot keep a failed job alive.
        self._thread = threading.Thread(
            target=self._run, args=(first_step,), name="axsparse-prefetch", daemon=True
        )
        self._thread.start()

    def get(self, step: int) -> Batch:
        """That step's batch, asleep until it is there; steps are asked for in order.

        Raises what `read` raised for this step, the object itself; that ends the thread.
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
        """End the thread; waits for the read under way, if any."""
        self._closed.set()
        # The thread may be asleep before a full queue. Emptied once, the queue has room
        # for the only item that can still come.
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
                # Of any class: what this thread swallowed, `get` would wait for for ever.
                self._queue.put(error)
                return
            self._queue.put(item)
            step += 1

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
