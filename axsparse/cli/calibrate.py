"""`axsparse calibrate`: measures this machine and writes a cluster file for `axsparse plan`."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from axsparse.cli.parser import CommandParser, add_configuration, refuse_early, whole
from axsparse.runtime.errors import writing
from axsparse.runtime.launcher import write_line

if TYPE_CHECKING:
    from axsparse.runtime.job import Job

DESCRIPTION = """\
Measure this machine for plans: a model in one stage on every rank at once, messages between two
ranks, all-reduces, compression. Takes a minute.

  mpirun -n 4 axsparse calibrate --config my.yaml --out my_cluster.yaml
  axsparse plan --config my.yaml --gpus 4 --cluster my_cluster.yaml

Start as many ranks as your runs will have on a node, and let nothing else run meanwhile.
"""
EPILOG = """\
Every constant in the file says whether it was measured, fitted or assumed. One node is measured;
constants between nodes are assumed to be the same; edit them if you know better.
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(prog="axsparse calibrate", description=DESCRIPTION, epilog=EPILOG)
    add = arguments.add_argument
    add_configuration(add)
    add("--out", metavar="FILE", type=Path, required=True, help="the cluster file to write")
    add(
        "--steps",
        metavar="N",
        type=whole(),
        default=10,
        help="steps of the model (default %(default)s)",
    )
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Measure, and end the process with the exit code of the run."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    refuse_early(arguments, arguments.overrides)
    # Imported late, so that --help loads neither torch nor MPI.
    from axsparse.config.load import load_config
    from axsparse.runtime.exchange import together
    from axsparse.runtime.job import run

    def work(job: Job) -> None:
        from axsparse.cli.machine_timing import PARTS, calibrate
        from axsparse.planner.cluster import to_yaml

        transport, out = job.transport, arguments.out
        loaded = together(transport, lambda: load_config(arguments.config, arguments.overrides))
        # A place that cannot be written is refused before a minute of measuring.
        together(transport, lambda: None if transport.rank else _check_place(out))
        numbers = itertools.count(1)

        def begins(what: str) -> None:
            if not transport.rank:
                write_line(f"measures {next(numbers)}/{PARTS}: {what}")

        cluster = calibrate(transport, loaded, out.stem, arguments.steps, begins)

        def write() -> None:
            if transport.rank:
                return
            with _writing(out):
                out.write_text(to_yaml(cluster), encoding="utf-8")
            print(to_yaml(cluster), end="", flush=True)
            print(f"axsparse: wrote {out}", flush=True)

        together(transport, write)

    run(work)


def _writing(out: Path) -> AbstractContextManager[None]:
    return writing(f"--out {out}: the cluster file", "choose another place")


def _check_place(out: Path) -> None:
    """OutputError if the cluster file cannot be written; nothing is left behind."""
    existed = out.exists()
    with _writing(out), out.open("a"):
        pass
    if not existed:
        out.unlink()
