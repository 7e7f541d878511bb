"""Runs `pip install` and says how far it is, in one line on a terminal, in a few lines in a log.

    python scripts/pip_progress.py --constraint constraints.txt --editable '.[mpich]'

All arguments are pip's. If pip fails, the end of what it said is printed; the exit code is pip's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque

SHOWN = 20
"""Lines of pip's that are printed if it fails."""
BEGINNINGS = ("Collecting ", "Downloading ", "Building ", "Installing ", "Preparing ")
"""How those lines of pip begin that say what it does next."""
LARGE = ("MB)", "GB)")
"""How a line about a large download ends, its size in brackets."""


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
OPTIONS = ("--progress-bar", "off")


def watched(command: list[str]) -> int:
    """Run an installation, say what it does, and return its exit code."""
    began, is_terminal = time.monotonic(), sys.stdout.isatty()
    last: deque[str] = deque(maxlen=SHOWN)
    with subprocess.Popen(  # noqa: S603 - no shell
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            last.append(line)
            said = " ".join(line.split())
            if not said.startswith(BEGINNINGS):
                continue
            seconds = int(time.monotonic() - began)
            text = f"  {seconds // 60:02}:{seconds % 60:02}  {said}"[:78]
            if is_terminal:
                print(f"\r\x1b[K{text}", end="", flush=True)
            elif said.endswith(LARGE) or said.startswith("Installing collected"):
                print(text, flush=True)
    if is_terminal:
        print("\r\x1b[K", end="", flush=True)
    if pip.returncode:
        sys.stderr.writelines(last)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(watched([*PIP, *OPTIONS, *sys.argv[1:]]))
