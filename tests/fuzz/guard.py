"""Watches what happens while something is read: how long it takes, and what it changes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from axsparse.runtime import errors
from axsparse.runtime.errors import AxsparseError

LIMITS = {signal.ITIMER_PROF: (signal.SIGPROF, 20), signal.ITIMER_REAL: (signal.SIGALRM, 300)}
"""Seconds of this process, where milliseconds are usual, and of the clock, which on a machine
that is busy with something else says little."""
CLASSES = {
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, AxsparseError) and value is not AxsparseError
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
"""Events that change what is on the disk, and how many paths they have first."""
_OTHERS = ("subprocess.", "socket.", "os.exec", "os.fork", "os.posix_spawn", "os.system")


class Hung(BaseException):
    """Not an Exception, so that no reader takes it for a damaged file."""


class _Watch:
    """The interpreter's own events of Python code; there is one watch, since audit hooks stay for
    good."""

    def __init__(self) -> None:
        self.folder: str | None = None
        """The only place that may be changed; None: nobody looks."""
        self.found: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        paths = arguments[: _PATHS.get(event, 0)]
        if event == "open" and arguments[2] & _WRITES:
            paths = arguments[:1]
        # A descriptor, an integer, was opened before.
        named = [Path(os.fsdecode(path)) for path in paths if not isinstance(path, int)]
        outside = [path for path in named if not path.resolve().is_relative_to(self.folder)]
        if outside or event.startswith(_OTHERS):
            self.found.append(f"{event} {arguments!r}")


WATCH = _Watch()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """AssertionError for what changes another place than a folder, starts a process or takes too
    long."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = {number: signal.signal(number, interrupt) for number, _ in LIMITS.values()}
    WATCH.found.clear()
    WATCH.folder = os.path.realpath(folder)
    for timer, (_, seconds) in LIMITS.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    except Hung:
        raise AssertionError("took too long") from None
    finally:
        for timer in LIMITS:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        WATCH.folder = None
    assert not WATCH.found, f"changed {WATCH.found}"


def read_or_rejected(read: Callable[[], object], folder: Path) -> None:
    """Read something; the only accepted failure is one line that a terminal shows as it is."""
    refusal: AxsparseError | None = None
    try:
        with watched(folder):
            read()
    except AxsparseError as told:
        refusal = told
    if refusal is not None:
        assert type(refusal) in CLASSES
        assert str(refusal).isprintable(), f"{type(refusal).__name__}: {str(refusal)!r}"
