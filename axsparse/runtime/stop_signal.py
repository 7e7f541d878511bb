"""Requests to stop a run, by Ctrl-C, SIGUSR1, SIGTERM or SIGHUP; a second one ends it at once.

A scheduler, a job script and a launcher may each pass on the same signal, so signals that come
within seconds of the first are taken for the same one. For Ctrl-C that time is short, since
somebody who presses it twice wants to leave.

Python runs signal handlers between two instructions of the main thread, and so not while that
thread waits in MPI or computes in torch. The interpreter's own handler writes the signal to a
pipe at once, and a thread of ours reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from axsparse.runtime.process import exit_at_once, interrupt, speaks, write_line
from axsparse.runtime.shared_segments import remove_own

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a run to stop; the last comes from a terminal that is closed."""
STAY_IGNORED = (signal.SIGHUP, signal.SIGINT)
"""The signals that a run leaves ignored: by nohup, and in a job in the background of a script."""
CTRL_C_ECHO_SECONDS = 0.5
"""How long after SIGINT another is taken for the same one: a terminal and a launcher send both
within milliseconds."""


def handle_interrupt(handler: Any) -> None:
    """Set the handler of Ctrl-C, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


class StopRequest:
    """Whether this rank was asked to stop."""

    def __init__(self, leave: Callable[[int], Any] = exit_at_once) -> None:
        """`leave(code)` ends the process at the second signal."""
        self.reason: str | None = None
        self.idle: tuple[signal.Signals, ...] = ()
        """The signals that the program has while nothing of a run is under way (`rest`)."""
        self.echo_seconds = 5.0
        """Seconds after the first signal in which further ones count as the same."""
        self._received_at: float | None = None
        self._rests = False
        self._leave = leave
        self._pipe: tuple[int, int] | None = None
        self._outer: tuple[int, os.stat_result] | None = None
        """The descriptor to which signals were written before, such as asyncio's, if any."""
        self._thread: threading.Thread | None = None
        self._before: dict[int, Any] = {}
        self._given_back: dict[int, Any] = {}

    @property
    def is_listening(self) -> bool:
        return self._pipe is not None

    @property
    def misses_signals(self) -> bool:
        """Whether SIGTERM would end the process without the run, which is in another thread than
        the main one: only the main thread can take signals."""
        is_main = threading.current_thread() is threading.main_thread()
        is_free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return not is_main and not self.is_listening and is_free

    @property
    def is_set(self) -> bool:
        return self.reason is not None

    def listen(self) -> None:
        """Take the signals from now on, but those for which the program has a handler of its own,
        and again those that `rest` has given back; in another thread than the main one, nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._rests = False
        if self._pipe is not None:
            for number, handler in self._given_back.items():
                if signal.getsignal(number) is handler:  # else the program has set its own since
                    signal.signal(number, self._note)
            self._given_back = {}
            return
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # The interpreter's own handler sees only signals that have a handler in Python.
        self._before = {
            number: signal.signal(number, self._note) for number in SIGNALS if self._takes(number)
        }
        outer = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._outer = None if outer == -1 else (outer, os.fstat(outer))
        reader = self._pipe[0]
        self._thread = threading.Thread(
            target=lambda: self._read(reader), name="axsparse signals", daemon=True
        )
        self._thread.start()

    def _takes(self, number: int) -> bool:
        """Whether a run takes a signal from the program's handler."""
        handler = signal.getsignal(number)
        if handler == signal.SIG_IGN:
            return number not in STAY_IGNORED
        is_own = isinstance(getattr(handler, "__self__", None), StopRequest)
        # asyncio's, which cancels what has not begun, would let a first Ctrl-C pass.
        is_loop = getattr(getattr(handler, "func", None), "__module__", None) == "asyncio.runners"
        usual = (signal.SIG_DFL, signal.default_int_handler, interrupt)
        return handler in usual or is_own or is_loop

    def release(self) -> None:
        """Give the signals back to the handlers that they had before. What came stays noted for the
        next run, but signals that the program has while none is under way (`idle`)."""
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        current = signal.set_wakeup_fd(self._open_outer(), warn_on_full_buffer=False)
        if current != self._pipe[1]:  # the program has set its own since
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._give_back(SIGNALS)
        if self._thread is not None and self._thread.is_alive():  # it is not in a fork
            os.write(self._pipe[1], b"\0")  # this ends the thread, which closes the other end
            self._thread.join()
        os.close(self._pipe[1])
        self._pipe = self._outer = None
        if self.reason in [number.name for number in self.idle]:
            self.forget()

    def forget(self) -> None:
        """Forget that a signal came, once a run has stopped for it."""
        self.reason = self._received_at = None

    def _open_outer(self) -> int:
        """The descriptor of `_outer`; -1 without one, and where it is another file's by now."""
        with suppress(OSError):
            if self._outer is not None:
                number, opened = self._outer
                return number if os.path.samestat(os.fstat(number), opened) else -1
        return -1

    def rest(self) -> None:
        """Give the signals `idle` back until `listen` is called again; what came stays noted."""
        if self._pipe is not None and threading.current_thread() is threading.main_thread():
            self._rests = True
            self._given_back |= self._give_back(self.idle)

    def _give_back(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Set the handlers from before again, and return them; the program's own since stay."""
        taken = [number for number in numbers if signal.getsignal(number) == self._note]
        for number in taken:
            signal.signal(number, self._before[number])
        return {number: self._before[number] for number in taken}

    def _note(self, number: int, _: object = None) -> None:
        """The handler: it notes the signal in the main thread, since the thread that reads may come
        to it only once it was given back."""
        self.reason = self.reason or signal.Signals(number).name

    def receive(self, number: int) -> None:
        """Note that a signal has come; a second one that is no echo ends the process. Signals that
        the program handles are its own."""
        if number not in SIGNALS or (self.is_listening and signal.getsignal(number) != self._note):
            return
        self._note(number)
        if self._received_at is None:
            self._received_at = time.monotonic()
            if number == signal.SIGINT and speaks():
                when = "after the step under way"
                if self._rests:
                    when = "at the next step or the end of the program"
                write_line(f"stops {when} and saves; Ctrl-C once more leaves at once")
            return
        echo = self.echo_seconds
        if number == signal.SIGINT:
            echo = min(echo, CTRL_C_ECHO_SECONDS)
        if time.monotonic() - self._received_at < echo:
            return
        if number != signal.SIGINT or speaks():
            write_line(f"leaving at once, by a second {signal.Signals(number).name}")
        remove_own()
        self._leave(128 + number)

    def _pass_on(self, number: int) -> None:
        """Write a signal of the program's to the descriptor that had it before."""
        outer = self._open_outer()
        if outer != -1:
            with suppress(OSError):  # of a full buffer
                os.write(outer, bytes([number]))

    def _read(self, reader: int) -> None:
        """Receive every signal that the interpreter writes to the pipe, until a 0 comes."""
        while 0 not in (numbers := os.read(reader, 64)):
            for number in numbers:
                if signal.getsignal(number) != self._note:
                    self._pass_on(number)
                self.receive(number)
        os.close(reader)
