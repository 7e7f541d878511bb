"""Plans as one HTML page, with timeline, memory and curves. It loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape

from axsparse.config.section import counted
from axsparse.observe import charts
from axsparse.observe.charts import (
    SERIES_COLOURS,
    WIDE,
    Bars,
    Curve,
    Lines,
    Timeline,
    chart_html,
    html_table,
)
from axsparse.planner.layout_search import Candidate, Plan
from axsparse.planner.plan_report import (
    answer,
    baseline_cells,
    baseline_remark,
    because,
    cells,
    memory_cells,
    rejections,
    settings,
    shown_stages,
    spans,
)
from axsparse.runtime.console import format_bytes

MOST_LAYOUTS = 6
"""Rows of a table that is not folded."""


MEMORY_COLOURS = {
    "weight": "#5aa9e6",
    "index": "#1f5f8b",
    "gradient": "#f2b134",
    "master": "#2e7d4f",
    "optimizer": "#e59a8f",
    "activations": "#7b3fa0",
    "working": "#c9a3e0",
    "logits": "#b0413e",
    "temporary": "#d9c46a",
    "checkpoint": "#4f6d6d",
    "overhead": "#b8bcc2",
}
"""The colours of the categories of `StageMemory`, in its order."""


def page(plans: Sequence[Plan], notes: Sequence[str]) -> str:
    """The text of the page; plans for several numbers of devices add a scaling curve."""
    lines = [
        *(f"<p>{escape(note)}</p>" for note in notes),
        *_scaling(plans),
        *(line for plan in plans for line in _section(plan)),
    ]
    title = f"{plans[0].request.model.name} on {plans[0].request.cluster.name}"
    return charts.page(title, lines)


def _section(plan: Plan) -> Iterator[str]:
    best, devices = plan.recommended, counted(plan.request.gpus, "device")
    yield f"<h2>{devices}, {plan.request.method}: {escape(answer(plan))}</h2>"
    if plan.baselines:
        rows = baseline_cells([plan])
        yield from html_table(list(rows[0]), (list(row.values()) for row in rows))
        yield f"<p>{escape(baseline_remark(best.layout, plan.request.cluster))}</p>"
    yield (
        f"<p>{best.seconds:.4g} s a step, {best.percent_of_peak:.1f} % of peak. Recommended "
        f"because {escape(because(plan))}. <code>{escape(settings(plan))}</code></p>"
    )
    yield from _layouts(plan)
    yield from chart_html(_timeline(best))
    yield from _memory(plan)
    if plan.rejected:
        yield "<h3>Rejected</h3><ul>"
        yield from (f"<li>{escape(line.strip())}</li>" for line in rejections(plan.rejected))
        yield "</ul>"


def _layouts(plan: Plan) -> Iterator[str]:
    rows = [{**cells(plan, row), "layout": str(row.layout.grid)} for row in plan.rows]
    heads, listed = list(rows[0]), [list(row.values()) for row in rows]
    yield from html_table(heads, listed[:MOST_LAYOUTS])
    if more := listed[MOST_LAYOUTS:]:
        yield f"<details><summary>{counted(len(more), 'more layout')}</summary>"
        yield from html_table(heads, more)
        yield "</details>"


def _timeline(row: Candidate) -> Timeline:
    simulated = spans(row)
    replica = min(span.replica for span in simulated)
    return Timeline("A step", [s for s in simulated if s.replica == replica], row.seconds)


def _memory(plan: Plan) -> Iterator[str]:
    """A bar for each stage, and a line at the memory budget of a rank."""
    best = plan.recommended
    there = {name for stage in best.memory for name, value in asdict(stage).items() if value}
    key = {name: colour for name, colour in MEMORY_COLOURS.items() if name in there}
    bars = [
        (f"stage {n}", [getattr(stage, part) for part in key], format_bytes(stage.total))
        for n, stage in enumerate(best.memory)
    ]
    rank_budget = plan.request.rank_budget
    limit = (rank_budget, f"limit {format_bytes(rank_budget)}")
    yield from chart_html(Bars("Memory of a rank", bars, list(key.values()), key, limit, WIDE))
    listed = [memory_cells(best, stage) for stage in shown_stages(best)]
    heads = [f"{head}, GB" if head == "total" else head for head in listed[0]]
    yield from html_table(heads, (list(row.values()) for row in listed))


def _scaling(plans: Sequence[Plan]) -> Iterator[str]:
    """Seconds of a step over the number of devices, both logarithmic; one curve for each method."""
    curves, ideal = [], []
    key: dict[str, str] = {}
    for plan in plans:
        key.setdefault(plan.request.method, SERIES_COLOURS[len(key) % len(SERIES_COLOURS)])
    for method, colour in key.items():
        points = [
            (p.request.gpus, p.recommended.seconds) for p in plans if p.request.method == method
        ]
        curves.append(Curve(method, points, colour, is_marked=True))
        gpus, seconds = points[0]
        perfect = [(n, seconds * gpus / n) for n, _ in points]
        ideal.append(Curve(f"{method}, perfect", perfect, colour, is_dashed=True))
    if len(curves[0].points) > 1:
        yield from chart_html(
            Lines(
                "Strong scaling: seconds of a step; dashed: twice the devices in half the time",
                [*ideal, *curves],
                "devices",
                logarithmic=True,
                across_logarithmic=True,
                key=key,
            )
        )
