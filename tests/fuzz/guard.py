"""Watches what happens while something is read: how long it takes, and what it touches."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import axsparse
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
_PROGRAM = tuple(
    os.path.realpath(path)
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(axsparse.__file__).parents[1] / "configs"),
        str(Path(axsparse.__file__).parent),
        # `importlib.metadata` opens each archive on Python's path, whether it exists or not.
        *(path for path in sys.path if path.endswith(".zip")),
    )
)
"""Paths that may be read, since a program reads itself."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), 1),
    **dict.fromkeys(("os.chown", "os.utime", "os.setxattr"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
"""Events that change what is on the disk, and how many paths they have first."""
_OTHERS = (
    "subprocess.",
    "socket.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
)


class Hung(BaseException):
    """Not an Exception, so that no reader takes it for a damaged file."""


class _Watch:
    """The interpreter's own events of Python code; there is one watch, since audit hooks stay for
    good."""

    def __init__(self) -> None:
        self.folder: str | None = None
        """The only place that may be touched; None: nobody looks."""
        self.found: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        folder = self.folder
        if folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            self._judge(event, path, folder, flags)
        elif event in _PATHS:
            for path in arguments[: _PATHS[event]]:
                self._judge(event, path, folder, _WRITES)
        elif event.startswith(_OTHERS):
            self.found.append(f"{event} {arguments!r}")

    def _judge(self, event: str, path: object, folder: str, flags: int) -> None:
        if isinstance(path, int):
            return
        assert isinstance(path, str | bytes | os.PathLike)
        named = Path(os.fsdecode(path))
        # A link that would not be followed stands for itself.
        real = named.parent.resolve() / named.name if flags & os.O_NOFOLLOW else named.resolve()
        reads_itself = not flags & _WRITES and any(map(real.is_relative_to, _PROGRAM))
        if not reads_itself and not real.is_relative_to(folder):
            self.found.append(f"{event} {real}")


WATCH = _Watch()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """AssertionError for what touches another place than a folder, starts a process or takes
    too long."""

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
    assert not WATCH.found, f"touched {WATCH.found}"


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
