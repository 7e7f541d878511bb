"""The one way out of the process; docs/reference/exit-codes.md explains each code."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from axsparse.runtime.launcher import write_line


def exit_process(code: int = 0, line: str | None = None) -> NoReturn:
    """End this process with an exit code, after a last line on stderr if there is one.

    The main thread raises SystemExit, so that `finally` clauses run; from another thread, where an
    exception would end that thread only, the process ends without them.
    """
    if line is not None:
        write_line(line)
    flush_streams()
    if threading.current_thread() is not threading.main_thread():
        exit_at_once(code)
    sys.exit(code)


def exit_at_once(code: int) -> NoReturn:
    """End this process from any thread, although a stream or MPI hangs: nothing is flushed."""
    os._exit(code)


def flush_streams() -> None:
    """Flush stdout and stderr; a reader that has gone is no mistake."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # Python flushes both once more at the exit, which would fail again.
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
