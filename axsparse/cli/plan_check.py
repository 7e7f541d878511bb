"""`axsparse plan check`: holds the planner against runs that were published, or are your own."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from axsparse.cli.parser import CommandParser, run_command, say
from axsparse.runtime.errors import OutputError

if TYPE_CHECKING:
    from axsparse.planner.published.run_check import Check

DESCRIPTION = """\
Predict runs that have been measured, and say how far the predictions are off.

  axsparse plan check                      the bundled tables of published runs
  axsparse plan check runs.yaml            a file of runs, on the cluster that it names
  axsparse plan check runs.yaml --cluster my_cluster.yaml --json
"""
EPILOG = """\
A row marked `fit: true` fits the constants that no datasheet tells: `efficiency`, `traffic` and
`nic_efficiency`, each within a range and starting from what the cluster file says. Mean and worst
are those of the other rows. docs/howto/check.md has the format of the file.

exit codes:
  0 done   66 input missing   74 output cannot be written   78 a file that says nothing sensible
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(prog="axsparse plan check", description=DESCRIPTION, epilog=EPILOG)
    add = arguments.add_argument
    add("runs", metavar="RUNS", nargs="?", type=Path, help="a YAML file of runs")
    add("--cluster", metavar="NAME", help="in the place of the cluster that the file names")
    add("--json", action="store_true", help="print rows, mean and worst as one JSON object")
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw predicted over published steps as SVG (axsparse[plot])",
    )
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Check, and end the process with its exit code; one of many ranks works."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_command(lambda: _check(parser().parse_args(argv)))


def _check(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help and mistakes in arguments load little.
    from axsparse.observe.charts import check_installed
    from axsparse.planner.published import check_report as report
    from axsparse.planner.published.run_file import bundled_tables

    if arguments.plot is not None:
        check_installed("--plot")
    files = bundled_tables() if arguments.runs is None else [arguments.runs]
    checks = [_checked(path, arguments.cluster) for path in files]
    if arguments.json:
        say(json.dumps(report.as_json(checks)))
    else:
        for check in checks:
            say("\n".join(report.lines(check)) + "\n")
        if arguments.runs is None:
            say("\n".join(report.scoreboard(checks)))
    if arguments.plot is not None:
        _write(arguments.plot, report.picture(checks))


def _checked(path: Path, cluster: str | None) -> Check:
    from axsparse.planner.cluster import load_cluster
    from axsparse.planner.published.run_check import check_runs
    from axsparse.planner.published.run_file import load_runs

    file = load_runs(path)
    named = cluster or file.cluster
    beside = path.parent / named
    if cluster is None and beside.is_file():
        named = f"{path.parent}/{named}"
    return check_runs(file, load_cluster(named))


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(
            f"--plot {path}: cannot be written ({error.strerror}); choose another place"
        ) from None
