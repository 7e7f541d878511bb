"""One piece of work at a time in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Work that has been started; its result or its failure is for whoever asks for it."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._results: list[T] = []
        self._failure: BaseException | None = None
        self._done = threading.Event()
        # A daemon: a rank that fails elsewhere must not wait for the disk.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether it is still at it."""
        return not self._done.is_set()

    def wait(self) -> None:
        """Wait until it is over, however it ended."""
        self._thread.join()

    def result(self) -> T:
        """Wait until it is over; raises what the work raised."""
        self.wait()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as failure:
            # Of any class: the thread of training has to hear of it.
            self._failure = failure
        finally:
            self._done.set()
