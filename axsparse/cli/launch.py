"""`axsparse launch`: starts ranks without a scheduler, and again where one dies."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from axsparse.cli.parser import CommandParser
from axsparse.config.load import packaged_folder
from axsparse.runtime.errors import MissingInputError

SCRIPT = "mpirun.sh"
DESCRIPTION = """\
Train on this machine, or on hosts that mpirun reaches, and go on from the last checkpoint when a
rank dies or hangs, up to three times. Everything after the number of ranks is handed to axsparse
train:

  axsparse launch 8 --config my.yaml --set layout.g_inter=4 --run-dir runs/my
  MPIRUN="mpirun --hostfile hosts" axsparse launch 16 --config my.yaml --run-dir runs/my
"""
EPILOG = """\
environment:
  MPIRUN     the launcher and its options (the mpirun beside this Python, else the first on PATH)
  PYTHON     the interpreter (this one)
  RESTARTS   how often to start again, at most (3)

kill -USR1 of this process saves and stops.
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        _become, prog="axsparse launch", description=DESCRIPTION, epilog=EPILOG
    )
    arguments.add_argument("ranks", metavar="RANKS", help="how many ranks to start")
    arguments.add_argument(
        "train", metavar="...", nargs=argparse.REMAINDER, help="the options of axsparse train"
    )
    return arguments


def _become(arguments: argparse.Namespace) -> None:
    """Become the script that starts the ranks; its exit code is that of training."""
    bash = shutil.which("bash")
    if bash is None:
        raise MissingInputError(f"launch: no bash, which {SCRIPT} is written for; install it")
    beside = Path(sys.executable).parent / "mpirun"
    os.environ.setdefault("PYTHON", sys.executable)
    if beside.is_file():
        os.environ.setdefault("MPIRUN", str(beside))
    words = [bash, str(packaged_folder("launch") / SCRIPT), arguments.ranks, *arguments.train]
    os.execv(bash, words)  # noqa: S606 - no shell splits the words
