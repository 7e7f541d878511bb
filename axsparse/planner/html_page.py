"""Draws plans as one HTML page, with timeline, memory and curves as inline SVG.

The page loads nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape

from axsparse.config.validate import counted
from axsparse.planner.layout_search import Plan, Row
from axsparse.planner.plan_report import MethodPlan, because, cells, rejections, settings
from axsparse.planner.stage_memory import gigabytes
from axsparse.planner.step_simulation import STEP_PHASES
from axsparse.planner.timeline import spans

WIDTH, LEFT = 960, 90
MOST_SPANS = 6_000
"""A longer timeline is cut off after so many spans, since browsers get slow."""
COLOURS = {
    "compute": "#4878a8",
    "compress": "#e09f3e",
    "p2p": "#9a5aa6",
    "bubble": "#e8e8e8",
    "collective": "#5b9a68",
    "optimizer": "#b5524a",
    "weight": "#4878a8",
    "index": "#7fb0d6",
    "gradient": "#e09f3e",
    "master": "#5b9a68",
    "activations": "#9a5aa6",
    "working": "#c79bd0",
    "logits": "#b5524a",
    "temporary": "#d8a39e",
    "checkpoint": "#6b8e8e",
    "overhead": "#9c9c9c",
}
METHODS = ("#4878a8", "#b5524a", "#5b9a68")
LETTER = 6.5
"""Width of a letter in pixels; rather too large than too small, since fonts differ."""
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; color: #222; }
svg { font: 11px system-ui, sans-serif; display: block; margin: .5em 0 1.5em; max-width: 100%; }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-variant-numeric: tabular-nums; }
td, th { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""


def page(answers: Sequence[MethodPlan], notes: Sequence[str]) -> str:
    """The text of the page; plans for several numbers of devices add a scaling curve."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{_title(answers)}</title>',
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{_title(answers)}</h1>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            *_scaling(answers),
            *(line for answer in answers for line in _section(answer)),
            "</body></html>",
            "",
        ]
    )


def _title(answers: Sequence[MethodPlan]) -> str:
    plan = answers[0].plan
    return escape(f"{plan.workload.name} on {plan.cluster.name}")


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
    if plan.rejected:
        yield "<h3>Rejected</h3><ul>"
        yield from (f"<li>{escape(line.strip())}</li>" for line in rejections(plan.rejected))
        yield "</ul>"


def _layouts(plan: Plan) -> Iterator[str]:
    rows = [{**cells(plan, row), "layout": str(row.layout.grid)} for row in plan.rows]
    heads = [head for head in rows[0] if head not in STEP_PHASES]
    yield "<table><tr>"
    yield "".join(f"<th>{head}</th>" for head in heads)
    yield "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(row[head])}</td>" for head in heads) + "</tr>"
    yield "</table>"


def _timeline(row: Row) -> Iterator[str]:
    """The timeline of the first replica that was simulated."""
    found = spans(row)
    replica = min(span.replica for span in found)
    found = sorted((s for s in found if s.replica == replica), key=lambda s: s.begin)
    drawn = found[:MOST_SPANS]
    length = row.seconds if len(drawn) == len(found) else max(span.end for span in drawn)
    height = 18
    yield from _keys({span.phase for span in found})
    yield _svg(height * row.layout.grid.g_inter + 20)
    for stage in range(row.layout.grid.g_inter):
        yield _text(4, height * stage + 13, f"stage {stage}")
    scale = (WIDTH - LEFT - 10) / length
    for span in drawn:
        width = max(0.3, scale * (span.end - span.begin))
        told = f"{span.name} ({span.phase}) {1e3 * (span.end - span.begin):.3g} ms"
        yield (
            f'<rect x="{LEFT + scale * span.begin:.2f}" y="{height * span.stage + 1}" '
            f'width="{width:.2f}" height="{height - 2}" fill="{COLOURS[span.phase]}">'
            f"<title>{escape(told)}</title></rect>"
        )
        if span.phase == "compute" and width > LETTER * len(span.name) + 6:
            x = LEFT + scale * span.begin + 3
            yield _text(x, height * span.stage + 13, span.name, fill="#fff")
    yield _text(LEFT, height * row.layout.grid.g_inter + 14, "0")
    yield _text(WIDTH - 70, height * row.layout.grid.g_inter + 14, f"{length:.3g} s")
    yield "</svg>"


def _memory(plan: Plan) -> Iterator[str]:
    """A bar for each stage, and a line at what a rank may take."""
    memory = plan.recommended.memory
    categories = list(asdict(memory[0]))
    scale = (WIDTH - LEFT - 10) / max(plan.memory_bytes, *(stage.total for stage in memory))
    height = 16
    yield from _keys(categories)
    yield _svg(height * len(memory) + 20)
    for number, stage in enumerate(memory):
        yield _text(4, height * number + 12, f"stage {number}")
        x = float(LEFT)
        for name, value in asdict(stage).items():
            yield (
                f'<rect x="{x:.2f}" y="{height * number + 1}" width="{scale * value:.2f}" '
                f'height="{height - 2}" fill="{COLOURS.get(name, COLOURS["optimizer"])}">'
                f"<title>{name} {value / 1e9:.2f} GB</title></rect>"
            )
            x += scale * value
    limit = LEFT + scale * plan.memory_bytes
    bottom = height * len(memory)
    yield f'<line x1="{limit:.2f}" x2="{limit:.2f}" y1="0" y2="{bottom}" stroke="#222"/>'
    yield _text(limit - 60, bottom + 14, f"{gigabytes(plan.memory_bytes)} GB")
    yield "</svg>"


def _scaling(answers: Sequence[MethodPlan]) -> Iterator[str]:
    """Seconds of a step over the number of devices, both logarithmic; one curve for each method."""
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

    yield _svg(height)
    labels = _Labels()
    drawn = list(zip(METHODS * len(curves), curves, strict=False))
    for colour, (name, curve) in drawn:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for point in curve:
            x, y = place(*point)
            told = f"{name}, {shown(point[0])} {across}: {shown(point[1])} s"
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
                f"<title>{escape(told)}</title></circle>"
            )
    yield from labels.first_free(across, (4, height - 8))
    for colour, (name, curve) in drawn:
        x, y = place(*curve[-1])
        yield from labels.first_free(name, *((x + 80, y + by) for by in (4, 18, -10)), fill=colour)
    for x in sorted({x for x, _ in points}):
        yield from labels.first_free(shown(x), (place(x, low)[0] - 4, height - 8))
    # Labels are set from the right, so that the right end keeps its own if room is short.
    for point in sorted(points, reverse=True):
        x, y = place(*point)
        yield from labels.first_free(f"{shown(point[1])} s", (x + 5, y - 6), (x + 5, y + 14))
    yield "</svg>"


class _Labels:
    """Places labels so that none overlaps another; a label without room is left out.

    The tooltips of the points have all values.
    """

    def __init__(self) -> None:
        self._boxes: list[tuple[float, float, float, float]] = []

    def first_free(
        self, text: str, *places: tuple[float, float], fill: str = "#222"
    ) -> Iterator[str]:
        """Draw the text at the first of these places that is free, if one is."""
        for x, y in places:
            left, top, right, bottom = box = (x, y - 10, x + LETTER * len(text), y + 3)
            if all(
                right <= a or c <= left or bottom <= b or d <= top for a, b, c, d in self._boxes
            ):
                self._boxes.append(box)
                yield _text(x, y, text, fill)
                return


def _keys(names: Sequence[str] | set[str]) -> Iterator[str]:
    found = [name for name in COLOURS if name in names]
    marks = (f'<span class="key" style="background:{COLOURS[n]}"></span>{n}' for n in found)
    yield f"<div>{''.join(marks)}</div>"


def _svg(height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'


def _text(x: float, y: float, text: str, fill: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}">{escape(text)}</text>'
