"""Plans as one HTML page, with timeline, memory and curves. It loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from axsparse.config.validate import counted
from axsparse.observe import charts
from axsparse.observe.charts import SERIES_COLOURS, Curve, Lines, Timeline, chart_html, html_table
from axsparse.planner.layout import Row
from axsparse.planner.layout_search import Plan
from axsparse.planner.memory_picture import memory_bars
from axsparse.planner.plan_report import (
    MethodPlan,
    backward_cells,
    because,
    cells,
    memory_cells,
    rejections,
    settings,
    shown_stages,
)
from axsparse.planner.timeline import spans

MOST_LAYOUTS = 6
"""Of a table that stands open."""


def page(answers: Sequence[MethodPlan], notes: Sequence[str]) -> str:
    """The text of the page; plans for several numbers of devices add a scaling curve."""
    lines = [
        *(f"<p>{escape(note)}</p>" for note in notes),
        *_scaling(answers),
        *(line for answer in answers for line in _section(answer)),
    ]
    return charts.page(_title(answers), lines, "axsparse plan")


def _title(answers: Sequence[MethodPlan]) -> str:
    plan = answers[0].plan
    return f"{plan.workload.name} on {plan.cluster.name}"


def _section(answer: MethodPlan) -> Iterator[str]:
    plan, best = answer.plan, answer.plan.recommended
    yield f"<h2>{counted(plan.gpus, 'device')}, {escape(answer.method)}: {best.layout.grid}</h2>"
    yield (
        f"<p>{best.seconds:.4g} s a step, {best.percent_of_peak:.1f} % of peak. Recommended "
        f"because {escape(because(plan))}. <code>{escape(settings(best))}</code></p>"
    )
    yield from _layouts(plan)
    yield from chart_html(_timeline(best))
    yield from _memory(plan)
    if plan.slack_curve:
        points = [(point.slack, point.seconds) for point in plan.slack_curve]
        curve = Curve("step", points, SERIES_COLOURS[0], is_marked=True)
        yield from chart_html(Lines("Seconds of a step over slack", [curve], "slack"))
    if len(plan.tried) > 1:
        yield "<h3>Whole and split backwards</h3>"
        tried = backward_cells(plan)
        yield from html_table(list(tried[0]), (list(row.values()) for row in tried))
    if plan.rejected:
        yield "<h3>Rejected</h3><ul>"
        yield from (f"<li>{escape(line.strip())}</li>" for line in rejections(plan.rejected))
        yield "</ul>"


def _layouts(plan: Plan) -> Iterator[str]:
    """The best layouts, and the others folded away."""
    rows = [{**cells(plan, row), "layout": str(row.layout.grid)} for row in plan.rows]
    heads, listed = list(rows[0]), [list(row.values()) for row in rows]
    yield from html_table(heads, listed[:MOST_LAYOUTS])
    if more := listed[MOST_LAYOUTS:]:
        yield f"<details><summary>{counted(len(more), 'more layout')}</summary>"
        yield from html_table(heads, more)
        yield "</details>"


def _timeline(row: Row) -> Timeline:
    """The timeline of the first replica that was simulated."""
    simulated = spans(row)
    replica = min(span.replica for span in simulated)
    return Timeline("A step", [s for s in simulated if s.replica == replica], row.seconds)


def _memory(plan: Plan) -> Iterator[str]:
    """A bar for each stage, and a line at what a rank may take."""
    rows = [(f"stage {n}", stage) for n, stage in enumerate(plan.recommended.memory)]
    yield from chart_html(memory_bars("Memory of a rank", rows, plan.memory_bytes, "limit"))
    best = plan.recommended
    listed = [memory_cells(best, stage) for stage in shown_stages(best)]
    heads = [f"{head}, GB" if head == "total" else head for head in listed[0]]
    yield from html_table(heads, (list(row.values()) for row in listed))


def _scaling(answers: Sequence[MethodPlan]) -> Iterator[str]:
    """Seconds of a step over the number of devices, both logarithmic; one curve for each method.

    A dashed line shows what each method would do if twice the devices took half the time.
    """
    curves, ideal = [], []
    key: dict[str, str] = {}
    for answer in answers:
        key.setdefault(answer.method, SERIES_COLOURS[len(key) % len(SERIES_COLOURS)])
    for method, colour in key.items():
        points = [(a.plan.gpus, a.plan.recommended.seconds) for a in answers if a.method == method]
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
