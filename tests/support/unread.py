"""Commands whose reader goes away before they print, as `head` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.mpirun import LONGEST_SECONDS


def unread(*arguments: str, cwd: Path) -> tuple[int, bytes]:
    """Exit code and stderr of an axsparse command with a screen that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "axsparse", *arguments],
            cwd=cwd,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=LONGEST_SECONDS,
            check=False,
        )
    return done.returncode, done.stderr
