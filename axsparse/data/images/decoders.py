"""Processes that decode images for one rank: views out, pixels back, and no wait without end.

A worker is a fresh Python that loads Pillow and neither torch nor MPI: after MPI has been
initialised a process must not be copied by fork, and a copy of a rank would be large.
It is connected by a socket pair. Whichever side dies, the other one reads the end of the
stream: the rank raises an error, the worker leaves.
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
"""First byte of an answer: the pixels follow, or why there are none."""


class Workers:
    """`count` processes, started when the first view is asked for; without any, `render` here.

    Any thread may call it. Views are taken up in the order in which they were started. What
    is under way is bounded by what the callers have started and not yet fetched.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._crew: _Crew | None = None

    def start(self, view: View) -> Callable[[], bytes]:
        """Begin to render a view; the call that is returned waits for its pixels.

        It raises DataError for a file that is no whole image, TrainingError if the
        process died over it.
        """
        if self._count == 0:
            return lambda: _render_here(view)
        with self._lock:
            if self._crew is None:
                self._crew = _Crew(self._count)
            return self._crew.start(view)

    def close(self) -> None:
        """End the processes; views that are not done raise. A later `start` makes new ones."""
        with self._lock:
            if self._crew is not None:
                self._crew.close()
                self._crew = None


class _Crew:
    """Processes at work, each with a thread that hands it one view after the other."""

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        processes = [_Worker() for _ in range(count)]
        threads = [
            # Daemons: a read that hangs must not keep a failed job alive.
            threading.Thread(
                target=_feed, args=(worker, self._tasks), name=f"axsparse-decode-{n}", daemon=True
            )
            for n, worker in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        # Also when nobody refers to it any more, and when Python ends.
        self.close = weakref.finalize(self, _dismiss, self._tasks, processes, threads)

    def start(self, view: View) -> Callable[[], bytes]:
        future: Future[bytes] = Future()
        self._tasks.put((view, future))
        return lambda: self._result(future)  # which keeps the crew at work as well

    def _result(self, future: Future[bytes]) -> bytes:
        return future.result()


class _Worker:
    """One process and the rank's end of the stream to it."""

    def __init__(self) -> None:
        self._stream, theirs = Pipe()
        # Where this process found its modules, the other one finds them, too.
        path = os.pathsep.join(entry or str(os.getcwd()) for entry in sys.path)  # noqa: PTH109
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this very module
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
        """It has nothing to tidy up."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._stream.close()

    def _end(self) -> str:
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
            # Of any class: what this thread swallowed would be waited for for ever.
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
    # Pillow names the file once more.
    text = str(error).replace("\n", " ")
    return f"{type(error).__name__}: {text}"


def serve(stream: Connection) -> None:
    """A worker's life: render what comes, until the rank closes the stream."""
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
    # Ctrl-C reaches every process of a terminal; the rank decides what it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
