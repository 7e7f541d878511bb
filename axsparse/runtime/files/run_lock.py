"""The lock of a run directory, which lets one job at a time write to it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import weakref
from pathlib import Path

from axsparse.runtime.errors import OutputError, writing

LOCK_FILE = "run.lock"
OTHER_RUN_DIR = "choose another --run-dir"
"""What helps where a run directory cannot be written."""
_JOB_VARIABLES = ("SLURM_JOB_ID", "LSB_JOBID")
_HELD = (errno.EACCES, errno.EAGAIN)
"""The errors by which the system says that another process holds a lock."""


class InUseError(OutputError):
    """Another process holds the run directory."""


class RunLock:
    """Holds a run directory for this process; however that ends, the system releases the lock."""

    def __init__(self, run_dir: Path) -> None:
        """InUseError if another process holds the directory, OutputError if it cannot be written.

        If its file system has no locks, a warning is printed, and the directory is used without.
        """
        self.is_exclusive = True
        """Whether other processes are kept out; False on a file system without locks."""
        path = run_dir / LOCK_FILE
        with writing(f"{path}:", OTHER_RUN_DIR):
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # The descriptor is closed with this object, and without the warning that Python gives for
        # a file that nobody has closed.
        self._close = weakref.finalize(self, os.close, number)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            if reason.errno in _HELD:
                holder = _holder(os.pread(number, 4096, 0))
                self.release()
                raise InUseError(
                    f"{run_dir}: is in use by {holder}; wait for its end, or choose another "
                    "--run-dir"
                ) from reason
            self.is_exclusive = False
            print(
                f"axsparse: warning: {path}: cannot be locked ({reason.strerror}); see that no "
                "other job has this --run-dir",
                file=sys.stderr,
                flush=True,
            )
        job = next((os.environ[name] for name in _JOB_VARIABLES if name in os.environ), None)
        said = {"host": socket.gethostname(), "process": os.getpid(), "job": job}
        with writing(f"{path}:", OTHER_RUN_DIR):
            os.ftruncate(number, 0)
            os.pwrite(number, json.dumps(said).encode(), 0)

    def release(self) -> None:
        """Let other processes have the directory."""
        self._close()


def _holder(said: bytes) -> str:
    """Who holds a directory, according to the contents of its lock file."""
    try:
        holder = json.loads(said)
        job = f"job {holder['job']}, " if holder["job"] is not None else ""
        return f"{job}process {holder['process']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
