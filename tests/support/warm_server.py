"""Forks a process for each command line that `support/warm_client.py` sends, with torch loaded.

Started as `warm_server.py FD FOLDER`: the number of a socket that listens, and the folder of the
commands. When its stdin ends, it removes the folder and ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from importlib import import_module

LOADED = (
    *("torch._dynamo", "mpi4py", "axsparse.cli.parser", "axsparse.training.trainer"),
    *("axsparse.observe.banner", "axsparse.training.export", "numpy.ma"),
)
LARGEST_MESSAGE = 1 << 20
MOST_FILES = 250
"""How many open files can be sent at once."""
HIGH = 512
"""Files of a fork lie from here on until the numbers below are free."""


@dataclass(frozen=True)
class Job:
    """A command line, and the files that are open where it was typed."""

    words: list[str]
    folder: str
    env: dict[str, str]
    files: list[int]

    def take_over(self, received: list[int]) -> None:
        """Make this fork the process that was asked for: its files, folder and environment."""
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in received]
        os.closerange(0, HIGH)
        for file, number in zip(high, self.files, strict=True):
            os.dup2(file, number)
        os.closerange(HIGH, 2 * HIGH)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.env)
        for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            stream = None
            if number in self.files:
                by_line = name == "stderr" or os.isatty(number) or "PYTHONUNBUFFERED" in os.environ
                errors = "backslashreplace" if name == "stderr" else None
                stream = open(number, mode, 1 if by_line else -1, errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def run(self) -> None:
        """Run the command line as Python does."""
        how, *rest = self.words
        own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[0:1] = [os.path.dirname(os.path.abspath(how)) if how[0] != "-" else "", *own]  # noqa: PTH100, PTH120
        if how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(rest[0], main.__dict__)  # noqa: S102 - as `python -c` does
        else:
            sys.argv = self.words
            runpy.run_path(how, run_name="__main__")


def next_job() -> Job:
    """Serve until a fork has something to do; returns in that fork only."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    while True:
        ready, _, _ = select.select([0, listening.fileno()], [], [])
        if 0 in ready:
            shutil.rmtree(sys.argv[2], ignore_errors=True)
            os._exit(0)
        client, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.detach()
            return keep(client)
        client.close()


def keep(client: socket.socket) -> Job:
    """Fork the process that a client asks for, and look after it until it ends."""
    said, received, _, _ = socket.recv_fds(client, LARGEST_MESSAGE, MOST_FILES)
    if not said:
        os._exit(0)
    job = Job(**json.loads(said))
    process = os.fork()
    if process == 0:
        client.detach()
        job.take_over(received)
        return job
    for file in received:
        os.close(file)
    ended = os.pidfd_open(process)
    while True:
        ready, _, _ = select.select([client.fileno(), ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            with contextlib.suppress(OSError):
                client.send(str(code).encode())
            os._exit(0)
        number = client.recv(1)
        # A client that was killed says nothing any more.
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)


def serve() -> Job:
    """Load what is slow to load when the first command comes, and serve; returns as `next_job`."""
    ready, _, _ = select.select([0, int(sys.argv[1])], [], [])
    for name in () if 0 in ready else LOADED:
        with contextlib.suppress(ModuleNotFoundError):  # another revision of the package
            import_module(name)
    gc.collect()
    gc.freeze()
    return next_job()


def exit_code(said: object) -> int:
    """The exit code that Python makes of the argument of `sys.exit`."""
    if said is None or isinstance(said, int):
        return said or 0
    print(said, file=sys.stderr)
    return 1


def finish(code: int, *, aborts: bool) -> None:
    """End as Python does, but leave all modules to the system, which takes a third of a second.

    `aborts` says whether a failure ends all ranks, as under `python -m mpi4py`.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = 120
    if "mpi4py.MPI" in sys.modules:
        MPI = sys.modules["mpi4py.MPI"]
        if MPI.Is_initialized() and not MPI.Is_finalized():
            if code and aborts:
                MPI.COMM_WORLD.Abort(code)
            MPI.Finalize()
    # What MPICH leaves to the end of a process is done by C's exit alone.
    ctypes.CDLL(None).exit(code)


if __name__ == "__main__":
    job = serve()
    code = 0
    try:
        job.run()
    except SystemExit as end:
        code = exit_code(end.code)
    except BaseException as error:
        code = 1
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    finish(code, aborts=job.words[:2] == ["-m", "mpi4py"])
