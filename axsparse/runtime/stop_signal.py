"""How a run is told to stop: SIGUSR1 or SIGTERM once, and at once by a second one later.

A scheduler, a job script and a launcher may each pass on the same signal, so those that come
within seconds of the first are it again.

Python runs signal handlers between two instructions of the main thread, so not while that
waits in MPI or computes in torch. What the interpreter's own handler writes to a pipe is there
at once, and a thread of ours reads it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopRequest:
    """Whether this rank was told to stop."""

    def __init__(self, leave: Callable[[int], Any] = os._exit) -> None:
        """`leave(code)` ends the process at the second signal."""
        self.reason: str | None = None
        """The name of the signal."""
        self.echo_seconds = 5.0
        """For so long after the first signal others are taken for the same."""
        self._heard_at = 0.0
        self._leave = leave
        self._pipe: tuple[int, int] | None = None
        self._before: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal has come."""
        return self.reason is not None

    def listen(self) -> None:
        """Take the signals from now on, if this is the main thread; once is enough."""
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # Without a handler of Python's, the interpreter's own would not see them.
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        reader = self._pipe[0]
        threading.Thread(
            target=lambda: self._read(reader), name="axsparse signals", daemon=True
        ).start()

    def release(self) -> None:
        """Give the signals back to whoever had them."""
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])  # ends the thread, which closes its own end
        self._pipe = None

    def hear(self, number: int) -> None:
        """A signal has come."""
        if number not in SIGNALS:
            return
        if self.reason is None:
            self.reason = signal.Signals(number).name
            self._heard_at = time.monotonic()
            return
        if time.monotonic() - self._heard_at < self.echo_seconds:
            return
        sys.stderr.write(f"axsparse: leaving at once, by a second {signal.Signals(number).name}\n")
        self._leave(128 + number)

    def _read(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                self.hear(number)
        os.close(reader)
