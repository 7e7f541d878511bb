"""Locks on files, and the lock of a run directory, which lets one job at a time write to it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

from axsparse.runtime.errors import OutputError, writing
from axsparse.runtime.launcher import write_line

LOCK_FILE = "run.lock"
OTHER_RUN_DIR = "choose another --run-dir"
"""The suggestion for a run directory that cannot be written."""
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID")
_HELD = (errno.EACCES, errno.EAGAIN)
"""The errors by which the system says that another process holds a lock."""


class InUseError(OutputError):
    """Another process holds the run directory."""


class FileLock:
    """A file that this process locks; however the process ends, the system releases the lock."""

    def __init__(self, path: Path) -> None:
        """BlockingIOError if another process has locked the file, OSError if it cannot be written.

        A file system without locks is not an error; `problem` says that it has none.
        """
        self.problem: str | None = None
        """Why nobody is kept out; None on a file system with locks."""
        self._number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        # The descriptor is closed with this object, and without the warning that Python gives for
        # a file that nobody has closed.
        self.release = weakref.finalize(self, os.close, self._number)
        try:
            fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            if reason.errno in _HELD:
                self.release()
                raise BlockingIOError(reason.errno, reason.strerror) from reason
            self.problem = reason.strerror

    def write(self, content: bytes) -> None:
        """Replace the contents of the file. Raises OSError."""
        os.ftruncate(self._number, 0)
        os.pwrite(self._number, content, 0)


class RunLock:
    """Holds a run directory for this process."""

    def __init__(self, run_dir: Path, option: str = "--run-dir") -> None:
        """InUseError if another process holds the directory, OutputError if it cannot be written.

        `option` is the one by which the user names the directory.

        If its file system has no locks, a warning is printed, and the directory is used without.
        """
        path = run_dir / LOCK_FILE
        try:
            with writing(f"{path}:", OTHER_RUN_DIR):
                lock = FileLock(path)
        except OutputError as reason:
            if not isinstance(reason.__cause__, BlockingIOError):
                raise
            raise InUseError(
                f"{run_dir}: is in use by {_holder(path)}; wait for its end, or choose another "
                f"{option}"
            ) from reason
        self.is_exclusive = lock.problem is None
        """Whether other processes are kept out; False on a file system without locks."""
        self.release: Callable[[], object] = lock.release
        """Let other processes have the directory."""
        if lock.problem is not None:
            write_line(
                f"warning: {path}: cannot be locked ({lock.problem}); see that no other job has "
                f"this {option}"
            )
        job = next((os.environ[name] for name in _JOB_VARIABLES if name in os.environ), None)
        said = {"host": socket.gethostname(), "process": os.getpid(), "job": job}
        with writing(f"{path}:", OTHER_RUN_DIR):
            lock.write(json.dumps(said).encode())
        self._lock = lock


def _holder(path: Path) -> str:
    """The owner of a directory, according to the contents of its lock file."""
    try:
        holder = json.loads(path.read_bytes())
        job = f"job {holder['job']}, " if holder["job"] is not None else ""
        return f"{job}process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
