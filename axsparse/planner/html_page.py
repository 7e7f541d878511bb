"""Draws plans as one HTML page, with timeline, memory and curves as inline SVG.

The page loads nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from axsparse.config.validate import counted
from axsparse.observe import web_page
from axsparse.observe.timeline_picture import LEFT, WIDTH, timeline
from axsparse.observe.web_page import SERIES_COLOURS, Labels, html_table, legend, svg
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

MOST_SPANS = 6_000
"""A longer timeline is cut off after so many spans, since browsers get slow."""

MOST_LAYOUTS = 6
"""Of a table that stands open."""


def page(answers: Sequence[MethodPlan], notes: Sequence[str]) -> str:
    """The text of the page; plans for several numbers of devices add a scaling curve."""
    lines = [
        *(f"<p>{escape(note)}</p>" for note in notes),
        *_scaling(answers),
        *(line for answer in answers for line in _section(answer)),
    ]
    return web_page.page(_title(answers), lines, "axsparse plan")


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
    yield "<h3>A step</h3>"
    yield from _timeline(best)
    yield "<h3>Memory of a rank</h3>"
    yield from _memory(plan)
    if plan.slack_curve:
        yield "<h3>Step over slack</h3>"
        points = [(point.slack, point.seconds) for point in plan.slack_curve]
        yield from _curves([("step", points)], "slack")
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


def _timeline(row: Row) -> Iterator[str]:
    """The timeline of the first replica that was simulated."""
    found = spans(row)
    replica = min(span.replica for span in found)
    found = sorted((s for s in found if s.replica == replica), key=lambda s: s.begin)
    drawn = found[:MOST_SPANS]
    length = row.seconds if len(drawn) == len(found) else max(span.end for span in drawn)
    yield from timeline(drawn, length)


def _memory(plan: Plan) -> Iterator[str]:
    """A bar for each stage, and a line at what a rank may take."""
    rows = [(f"stage {n}", stage) for n, stage in enumerate(plan.recommended.memory)]
    yield from memory_bars(rows, plan.memory_bytes, "limit")
    best = plan.recommended
    listed = [memory_cells(best, stage) for stage in shown_stages(best)]
    heads = [f"{head}, GB" if head == "total" else head for head in listed[0]]
    yield from html_table(heads, (list(row.values()) for row in listed))


def _scaling(answers: Sequence[MethodPlan]) -> Iterator[str]:
    """Seconds of a step over the number of devices, both logarithmic; one curve for each method.

    A dashed line shows what each method would do if twice the devices took half the time.
    """
    methods = list(dict.fromkeys(answer.method for answer in answers))
    curves = [
        (
            method,
            [
                (math.log2(a.plan.gpus), math.log2(a.plan.recommended.seconds))
                for a in answers
                if a.method == method
            ],
        )
        for method in methods
    ]
    if len(curves[0][1]) > 1:
        yield "<h2>Strong scaling</h2>"
        yield from _curves(curves, "devices", logarithmic=True)
        yield '<p class="note">Dashed: twice the devices in half the time.</p>'


def _curves(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    across: str,
    *,
    logarithmic: bool = False,
) -> Iterator[str]:
    """A line through the points of each curve, in seconds; logarithmic values are powers of two."""

    def shown(value: float) -> str:
        return f"{2**value if logarithmic else value:.4g}"

    points = [point for _, curve in curves for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    height = 180

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH / 2) * (x - left) / ((right - left) or 1),
            height - 30 - (height - 60) * (y - low) / ((high - low) or 1),
        )

    drawn = list(zip(SERIES_COLOURS * len(curves), curves, strict=False))
    if len(curves) > 1:
        yield legend({name: colour for colour, (name, _) in drawn})
    yield f'<div class="wide">{svg(LEFT + WIDTH / 2 + 80, height)}'
    labels = Labels()
    for colour, (name, curve) in drawn:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        if logarithmic:
            yield _ideal(place, curve, low, colour)
        for point in curve:
            x, y = place(*point)
            told = f"{name}, {shown(point[0])} {across}: {shown(point[1])} s"
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
                f"<title>{escape(told)}</title></circle>"
            )
    yield from labels.first_free(across, (4, height - 8))
    yield from labels.first_free("seconds a step", (4, 12))
    for x in sorted({x for x, _ in points}):
        yield from labels.first_free(shown(x), (place(x, low)[0] - 4, height - 8))
    # Labels are set from the right, so that the right end keeps its own if room is short.
    for point in sorted(points, reverse=True):
        x, y = place(*point)
        yield from labels.first_free(f"{shown(point[1])} s", (x + 5, y - 6), (x + 5, y + 14))
    yield "</svg></div>"


def _ideal(
    place: Callable[[float, float], tuple[float, float]],
    curve: Sequence[tuple[float, float]],
    low: float,
    colour: str,
) -> str:
    """The line of perfect scaling from a curve's first point, down to the value `low`."""
    (x, y), (last, _) = curve[0], curve[-1]
    end = min(last, x + y - low)
    (a, b), (c, d) = place(x, y), place(end, y - (end - x))
    return (
        f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{colour}" '
        'stroke-dasharray="4 4"><title>perfect scaling</title></line>'
    )
