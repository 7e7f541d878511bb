"""Processes that decode images for one rank: it sends them views, and they return pixels.

A worker is a new Python process that runs this module (`python -m`). It loads Pillow, but
neither torch nor MPI: once MPI is initialised a process must not fork, and a copy of a rank
would be large. A socket pair connects the two. If one side dies, the other one reads the end
of the stream, so that nobody waits forever: the rank raises an error, the worker exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from axsparse.data.images.augmentation import View, render
from axsparse.runtime.errors import DataError, TrainingError

Task = tuple[View, "Future[bytes]"]
_PIXELS, _REASON = b"\0", b"\1"
"""The first byte of an answer: pixels follow, or the reason why there are none."""


class Workers:
    """`count` decoding processes, which are created when the first view is started.

    With `count` 0, views are decoded in this process, when they are fetched. Any thread may
    call the methods. Views are decoded in the order in which they were started; the callers
    bound their number by fetching them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._crew: _Crew | None = None

    def start(self, view: View) -> Callable[[], bytes]:
        """Begin to decode a view; the returned function waits for its pixels (see `render`).

        That function raises DataError if the file is not a complete image, TrainingError if
        the process died while it decoded the view.
        """
        if self._count == 0:
            return lambda: _render_here(view)
        with self._lock:
            if self._crew is None:
                self._crew = _Crew(self._count)
            return self._crew.start(view)

    def close(self) -> None:
        """End the processes; to fetch an unfinished view raises. A later `start` makes new ones."""
        with self._lock:
            if self._crew is not None:
                self._crew.close()
                self._crew = None


class _Crew:
    """Running processes, each with a thread that sends it one view after the other."""

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        processes = [_Worker() for _ in range(count)]
        threads = [
            # Daemon threads, so that a read that hangs does not keep a failed job alive.
            threading.Thread(
                target=_feed, args=(worker, self._tasks), name=f"axsparse-decode-{n}", daemon=True
            )
            for n, worker in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        # The processes also end when nothing refers to this object any more, and at exit.
        self.close = weakref.finalize(self, _dismiss, self._tasks, processes, threads)

    def start(self, view: View) -> Callable[[], bytes]:
        future: Future[bytes] = Future()
        self._tasks.put((view, future))
        # The function refers to this object, which keeps the processes alive.
        return lambda: self._result(future)

    def _result(self, future: Future[bytes]) -> bytes:
        return future.result()


class _Worker:
    """One process, and the end of its stream that belongs to the rank."""

    def __init__(self) -> None:
        self._stream, theirs = Pipe()
        # The new process searches for modules where this one does.
        path = os.pathsep.join(entry or str(os.getcwd()) for entry in sys.path)  # noqa: PTH109
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - runs this module
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )

    def render(self, view: View) -> bytes:
        try:
            self._stream.send(view)
            answer = self._stream.recv_bytes()
        except (EOFError, OSError):
            raise TrainingError(
                f"data.workers: the process that decoded {view.path} {self._end()}; set "
                "data.workers to 0 to see why, or lower it if memory ran out"
            ) from None
        if answer[:1] == _REASON:
            raise _unreadable(view, answer[1:].decode())
        return answer[1:]

    def kill(self) -> None:
        """End the process at once; it has nothing to clean up."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._stream.close()

    def _end(self) -> str:
        """How the process ended, for an error message."""
        code = self._process.wait()
        return (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        )


def _feed(worker: _Worker, tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        view, future = task
        try:
            future.set_result(worker.render(view))
        except BaseException as error:
            # Exceptions of every class are passed on: a caller would wait forever for a lost one.
            future.set_exception(error)
    worker.close()


def _dismiss(
    tasks: SimpleQueue[Task | None], workers: list[_Worker], threads: list[threading.Thread]
) -> None:
    with contextlib.suppress(Empty):
        while True:
            task = tasks.get_nowait()
            if task is not None:
                task[1].cancel()
    for _ in threads:
        tasks.put(None)
    for worker in workers:
        worker.kill()
    for thread in threads:
        thread.join()


def _render_here(view: View) -> bytes:
    try:
        return render(view)
    except Exception as error:
        raise _unreadable(view, _reason(error)) from error


def _unreadable(view: View, reason: str) -> DataError:
    return DataError(
        f"{view.path}: not an image that can be read ({reason}); repair it, or take it out of "
        "the folder on all hosts"
    )


def _reason(error: Exception) -> str:
    # Error messages are one line.
    text = str(error).replace("\n", " ")
    return f"{type(error).__name__}: {text}"


def serve(stream: Connection) -> None:
    """The loop of a worker process: decode views until the rank closes the stream."""
    while True:
        try:
            view: View = stream.recv()
        except (EOFError, OSError):
            return
        try:
            answer = _PIXELS + render(view)
        except Exception as error:
            answer = _REASON + _reason(error).encode(errors="backslashreplace")
        try:
            stream.send_bytes(answer)
        except OSError:
            return


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal; the rank alone decides what to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
