"""Work that runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWork(Generic[T]):
    """Work in a thread that starts at once; its result, or the error it raised, is kept."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._results: list[T] = []
        self._failure: BaseException | None = None
        self._done = threading.Event()
        # As a daemon it does not keep a rank that failed elsewhere waiting for the disk.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the work is not over yet."""
        return not self._done.is_set()

    def wait(self) -> None:
        """Wait until the work is over, whether it succeeded or failed."""
        self._thread.join()

    def result(self) -> T:
        """Wait for the result; raises what the work raised."""
        self.wait()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as failure:
            # Errors of every class are raised again in the thread that asks for the result.
            self._failure = failure
        finally:
            self._done.set()
