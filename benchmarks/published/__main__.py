"""Predict runs that have been published, and say how far the predictions are off.

    cd benchmarks
    python -m published                      the bundled tables
    python -m published runs.yaml            a file like one of them (`run_file.py` has its keys)

Mean and worst are over rows to which no constant was fitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from axsparse.planner.cluster import load_cluster
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import AxsparseError
from published.run_check import Check, CheckedRow, check_runs, choices
from published.run_file import bundled_tables, load_runs


def lines(check: Check) -> Iterator[str]:
    """One file as a table, and the choices."""
    yield f"{check.name} on {check.cluster.name}"
    if check.source:
        yield f"source: {check.source}"
    yield ""
    yield from table([_cells(each) for each in check.rows])
    yield ""
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
    """Check the files, and print tables."""
    files = [Path(path) for path in sys.argv[1:]] or bundled_tables()
    try:
        checks = [checked_file(path) for path in files]
    except (AxsparseError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for check in checks:
        print("\n".join(lines(check)) + "\n")
    print("\n".join(scoreboard(checks)))


def checked_file(path: Path) -> Check:
    """A file's runs against their predictions."""
    file = load_runs(path)
    return check_runs(file, load_cluster(file.cluster))


if __name__ == "__main__":
    main()
