"""Says in a table, as JSON and as a picture how far predictions of published runs are off."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from axsparse.planner.plan_report import table
from axsparse.planner.published.run_check import Check, CheckedRow, choices

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


def picture(checks: Sequence[Check]) -> bytes:
    """An SVG of predicted over published steps, in seconds on two logarithmic axes.

    Rows that were fitted are empty circles. ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure((6.0, 6.0), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="published step, s", ylabel="predicted step, s")
    for number, check in enumerate(checks):
        known = [each for each in check.rows if each.published is not None]
        axes.scatter(
            [each.seconds + each.slower for each in known],
            [each.seconds for each in known],
            label=check.name,
            edgecolors=f"C{number}",
            facecolors=["none" if each.row.fit else f"C{number}" for each in known],
        )
    axes.axline((1.0, 1.0), (10.0, 10.0), color="#bbb", zorder=0)
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    return file.getvalue()
