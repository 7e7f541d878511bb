"""Predict runs that have been measured, and say how far the predictions are off.

    cd benchmarks
    python -m published                      the bundled tables of published runs
    python -m published runs.yaml            a file of runs, on the cluster that it names
    python -m published runs.yaml --cluster my_cluster.yaml --json

A row marked `fit: true` fits the constants that no datasheet tells: `efficiency`, `traffic` and
`nic_efficiency`, each within a range and starting from what the cluster file says. Mean and worst
are those of the other rows. docs/howto/check.md has the format of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from axsparse.planner.cluster import load_cluster
from axsparse.runtime.errors import AxsparseError
from published import check_report as report
from published.run_check import Check, check_runs
from published.run_file import bundled_tables, load_runs


def main() -> None:
    """Check the files, and print tables or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", metavar="RUNS", nargs="?", type=Path, help="a YAML file of runs")
    add("--cluster", metavar="NAME", help="in the place of the cluster that the file names")
    add("--json", action="store_true", help="print rows, mean and worst as one JSON object")
    arguments = parser.parse_args()
    files = bundled_tables() if arguments.runs is None else [arguments.runs]
    try:
        checks = [checked_file(path, arguments.cluster) for path in files]
    except AxsparseError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(report.as_json(checks)))
        return
    for check in checks:
        print("\n".join(report.lines(check)) + "\n")
    if arguments.runs is None:
        print("\n".join(report.scoreboard(checks)))


def checked_file(path: Path, cluster: str | None = None) -> Check:
    """A file's runs against their predictions, on its cluster or another."""
    file = load_runs(path)
    named = cluster or file.cluster
    beside = path.parent / named
    if cluster is None and beside.is_file():
        named = str(beside)
    return check_runs(file, load_cluster(named))


if __name__ == "__main__":
    main()
