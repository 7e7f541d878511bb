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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from axsparse.planner.cluster import load_cluster
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import AxsparseError
from published.run_check import Check, CheckedRow, check_runs, choices
from published.run_file import bundled_tables, load_runs

MISS = 0.05
"""An error from which on the table says what would explain it."""


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The rows, and mean and worst of the absolute errors of those that were not fitted."""
    rows = [each for check in checks for each in check.rows]
    errors = [abs(each.error or 0.0) for check in checks for each in check.predicted]
    return {
        "rows": [
            {
                "name": each.row.name,
                "predicted": each.predicted,
                "published": each.published,
                "error": each.error,
                "fits": each.fits,
            }
            for each in rows
        ],
        "mean": sum(errors) / len(errors) if errors else None,
        "worst": max(errors, default=None),
    }


def lines(check: Check) -> Iterator[str]:
    """One file as a table, with what was fitted, the misses and the choices."""
    yield f"{check.name} on {check.cluster.name}"
    if check.source:
        yield f"source: {check.source}"
    yield ""
    yield from table([_cells(each) for each in check.rows])
    yield ""
    for one in check.fitted:
        yield (
            f"fitted {one.name} = {one.value:.4g} (from {one.before:.4g}, "
            f"range {one.least:g} to {one.most:g})"
        )
    yield _summary(check)
    for choice in choices(check.rows):
        first, names = choice.rows[0].row.name, len(choice.rows)
        yield (
            f"choice of {names}: {first} is predicted best, the best published is at place "
            f"{choice.place_of_best}"
        )


def scoreboard(checks: Sequence[Check]) -> Iterator[str]:
    """A line for each file."""
    yield from table([_score(check) for check in checks])


def _cells(each: CheckedRow) -> dict[str, str]:
    error, off = each.error, each.memory_error
    known = each.row.published
    mark = "fit" if each.row.fit else ""
    verdict = "yes" if each.fits else "no"
    if known.fits is not None and known.fits != each.fits:
        verdict += f" (published {'yes' if known.fits else 'no'})"
    return {
        "name": each.row.name,
        "unit": each.unit,
        "predicted": f"{each.predicted:.4g}",
        "published": "" if each.published is None else f"{each.published:.4g}",
        "error %": mark if error is None else f"{100 * error:+.1f}{' ' * bool(mark)}{mark}",
        "GB": f"{each.memory.total / 1e9:.1f}",
        "published GB": "" if known.memory_gb is None else f"{known.memory_gb:g}",
        "GB error %": "" if off is None else f"{100 * off:+.1f}",
        "fits": verdict,
        "a miss by": "" if error is None or abs(error) < MISS else each.explanation,
    }


def _summary(check: Check) -> str:
    if check.mean is None or check.worst is None:
        return "no row was predicted: all were fitted, or none has a time"
    text = (
        f"mean {100 * check.mean:.1f} %, worst {100 * check.worst:.1f} % of "
        f"{len(check.predicted)} predicted rows"
    )
    if check.memory_worst is not None:
        text += f"; memory within {100 * check.memory_worst:.1f} %"
    return text


def _score(check: Check) -> dict[str, str]:
    places = [choice.place_of_best for choice in choices(check.rows)]
    missed = [each for each in check.predicted if abs(each.error or 0.0) == check.worst]
    return {
        "table": check.name,
        "cluster": check.cluster.name,
        "fitted rows": str(sum(each.row.fit for each in check.rows)),
        "predicted rows": str(len(check.predicted)),
        "mean %": "" if check.mean is None else f"{100 * check.mean:.1f}",
        "worst %": "" if check.worst is None else f"{100 * check.worst:.1f}",
        "worst row": missed[0].row.name if missed else "",
        "GB worst %": "" if check.memory_worst is None else f"{100 * check.memory_worst:.1f}",
        "best is at": ", ".join(map(str, places)),
    }


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
        print(json.dumps(as_json(checks)))
        return
    for check in checks:
        print("\n".join(lines(check)) + "\n")
    if arguments.runs is None:
        print("\n".join(scoreboard(checks)))


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
