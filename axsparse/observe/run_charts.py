"""The charts of one run, or of several over each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from axsparse.observe.line_chart import (
    Chart,
    Column,
    Curve,
    Point,
    column_chart,
    line_chart,
    thinned,
)
from axsparse.observe.metrics import perplexity
from axsparse.observe.phases import PHASES
from axsparse.observe.run_records import Record, number, step_of
from axsparse.observe.run_view import RunView
from axsparse.observe.web_page import PHASE_COLOURS
from axsparse.runtime.console import Unit

MOST_POINTS = 200
"""Of a curve; with several runs fewer, so that the page stays below 1 MB."""
MOST_COLUMNS = 80
"""Of a chart of phases; with several runs fewer."""


def most_of(of_one: int, runs: Sequence[RunView]) -> int:
    """How much is drawn of each run, if so much is drawn of one that is alone."""
    return max(16, 2 * of_one // (1 + len(runs)))


def training_charts(runs: Sequence[RunView], colours: Mapping[str, str]) -> Iterator[str]:
    most = most_of(MOST_POINTS, runs)
    has_tokens = any(
        number(r, "perplexity") is not None for run in runs for r in run.records.evaluations
    )
    crosses = [
        (step_of(record), _skipped(run, record))
        for run in runs
        for record in run.records.steps
        if record.get("skipped")
    ]
    crosses = crosses[:: max(1, len(crosses) // most)]

    def of_steps(name: str, change: Callable[[float], float | None] = float) -> list[Curve]:
        return [
            _curve(run, run.records.steps, name, colours[run.name], most, change) for run in runs
        ]

    def of_evaluations(name: str) -> list[Curve]:
        return [
            replace(
                _curve(run, run.records.evaluations, name, colours[run.name], most),
                name=f"{run.name} validation",
                is_dashed=True,
                is_marked=True,
            )
            for run in runs
        ]

    loss = Chart("loss; dashed: validation", crosses=crosses, shown="{:.5g}".format)
    if has_tokens:
        loss = replace(loss, title="loss, nats a token; dashed: validation")
    yield from line_chart([*of_steps("loss"), *of_evaluations("eval_loss")], loss)
    if has_tokens:
        curves = [*of_steps("loss", _finite_perplexity), *of_evaluations("perplexity")]
        yield from line_chart(curves, Chart("perplexity; dashed: validation", logarithmic=True))
    for name in dict.fromkeys(
        n for run in runs for r in run.records.evaluations for n in metrics_of(r)
    ):
        yield from line_chart(of_evaluations(name), Chart(f"{name}, share of targets; validation"))
    yield from line_chart(of_steps("learning_rate"), Chart("learning rate"))
    norms = of_steps("grad_norm")
    chart = Chart("norm of the gradient", logarithmic=_is_wide(norms), crosses=crosses)
    yield from line_chart(norms, chart)
    scales = of_steps("loss_scale")
    if any(y != 1 for curve in scales for _, y in curve.points):
        yield from line_chart(scales, Chart("loss scale", logarithmic=True))
    yield from line_chart(of_steps("tokens_per_second"), Chart(f"{unit_of(runs)} a second"))


def unit_of(runs: Sequence[RunView]) -> Unit:
    """What rates count: tokens where a run has perplexities, or has not been evaluated yet."""
    evaluations = [record for run in runs for record in run.records.evaluations]
    has_tokens = any(number(record, "perplexity") is not None for record in evaluations)
    return "tokens" if has_tokens or not evaluations else "samples"


# Reason: a curve is these six things, and only this function knows them all.
def _curve(
    run: RunView,
    records: Sequence[Record],
    name: str,
    colour: str,
    most: int,
    change: Callable[[float], float | None] = float,
) -> Curve:
    """A field of all records over their steps, changed where `change` is given."""
    points: list[Point] = []
    for record in records:
        value = number(record, name)
        points.append((step_of(record), None if value is None else change(value)))
    return Curve(run.name, thinned(points, most), colour)


def _finite_perplexity(loss: float) -> float | None:
    found = perplexity(loss)
    return found if math.isfinite(found) else None


def _is_wide(curves: Sequence[Curve]) -> bool:
    """Whether values differ so much that only a logarithmic axis shows them all."""
    values = [y for curve in curves for _, y in curve.points if y is not None and y > 0]
    return bool(values) and max(values) > 30 * min(values)


def _skipped(run: RunView, record: Record) -> str:
    reason = record.get("skip_reason") or "no reason told"
    return f"{run.name}, step {step_of(record):g} was skipped: {reason}"


def memory_charts(runs: Sequence[RunView], colours: Mapping[str, str]) -> Iterator[str]:
    """Model state and peak over the steps; where it was planned, the peak that the plan says."""
    most = most_of(MOST_POINTS, runs)
    for name, title in (("model_state_bytes", "model state"), ("peak_memory_bytes", "peak")):
        beside = ""
        curves = [_curve(run, run.records.steps, name, colours[run.name], most) for run in runs]
        if name == "peak_memory_bytes":
            planned = [curve for run in runs for curve in _planned(run, colours[run.name])]
            curves += planned
            beside = "; dashed: planned" if planned else ""
        largest = max((y for c in curves for _, y in c.points if y is not None), default=0.0)
        unit, name_of_unit = next(
            (u, n)
            for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
            if largest >= u or u == 1
        )
        scaled = [
            replace(c, points=[(x, None if y is None else y / unit) for x, y in c.points])
            for c in curves
        ]
        shown = f"{{:.4g}} {name_of_unit}".format
        yield from line_chart(scaled, Chart(f"{title}, {name_of_unit}{beside}", shown=shown))


def _planned(run: RunView, colour: str) -> Iterator[Curve]:
    steps = run.records.steps
    for record in run.records.plans[-1:]:
        planned = number(record, "predicted_peak_memory_bytes")
        if steps and planned is not None:
            ends = sorted({step_of(steps[0]), step_of(steps[-1])})
            yield Curve(f"{run.name} planned", [(x, planned) for x in ends], colour, is_dashed=True)


def phase_chart(run: RunView, most: int, *, several: bool) -> Iterator[str]:
    """Columns of the phases, each the mean of a few steps."""
    rows = [
        (step_of(record), {p: number(record, f"{p}_seconds") for p in PHASES})
        for record in run.records.steps
    ]
    known = [(step, parts) for step, parts in rows if all(v is not None for v in parts.values())]
    size = -(-len(known) // most) if known else 1
    columns = []
    for start in range(0, len(known), size):
        group = known[start : start + size]
        means = {
            p: statistics.fmean(max(0.0, parts[p] or 0.0) for _, parts in group) for p in PHASES
        }
        columns.append(Column(group[0][0], group[-1][0], means))
    title = "seconds of a step by phase, mean over ranks"
    if size > 1:
        title += f" and {size} steps"
    named = f"{run.name}: {title}" if several else title
    yield from column_chart(columns, PHASE_COLOURS, Chart(named, shown="{:.3g} s".format))


def metrics_of(evaluated: Record) -> dict[str, float]:
    """The metrics of the model in an evaluation."""
    return {
        name: value
        for name, value in evaluated.items()
        if name not in ("step", "time", "eval_loss", "perplexity") and isinstance(value, float)
    }
