"""Draws curves over steps, and stacked columns, as inline SVG with axes, units and tooltips."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from axsparse.observe.web_page import LETTER, legend, svg, text

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 36
"""Margins around the frame of a chart."""
TICKS = 5
"""About as many numbers stand along an axis."""

Point = tuple[float, float | None]
"""A step, and a value; None where there is none, which interrupts the curve."""


@dataclass(frozen=True)
class Curve:
    """One curve of a chart."""

    name: str
    points: Sequence[Point]
    colour: str
    is_dashed: bool = False
    is_marked: bool = False
    """Whether each point is drawn, and not only shown under the pointer."""


@dataclass(frozen=True)
class Chart:
    """What is drawn beside the curves, and how numbers are written."""

    title: str
    """What the values are, with their unit."""
    across: str = "step"
    logarithmic: bool = False
    """Whether values lie on a logarithmic axis; those that are not positive are left out."""
    shown: Callable[[float], str] = "{:.4g}".format
    """Writes a value in a tooltip."""
    crosses: Sequence[tuple[float, str]] = ()
    """Steps that are marked below the curves, each with what its tooltip says."""
    colours: Mapping[str, str] = field(default_factory=dict)
    """The legend; empty for none."""


class _Frame:
    """Places steps and values in a picture, and draws its axes."""

    def __init__(
        self, xs: tuple[float, float], ys: tuple[float, float], *, logarithmic: bool = False
    ) -> None:
        """The first and last step, and the least and largest value."""
        self._left, self._right = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[0] + 0.5)
        self._log = logarithmic
        low, high = (math.log10(y) for y in ys) if logarithmic else ys
        room = 0.05 * (high - low)
        if room <= 1e-9 * max(abs(low), abs(high)):
            room = 0.05 * abs(high) if abs(high) > 1e-200 else 0.5
        # Columns begin at 0, where nothing needs room below.
        self._low, self._high = (low if ys[0] == 0 and not logarithmic else low - room), high + room

    def x(self, step: float) -> float:
        share = (step - self._left) / (self._right - self._left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        at = math.log10(value) if self._log else value
        share = (at - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self, across: str) -> Iterator[str]:
        """Lines and numbers along both axes."""
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value in self._values():
            y = self.y(value)
            yield (
                f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" '
                'stroke="currentColor" stroke-opacity=".15"/>'
            )
            yield text(LEFT - 5, y + 4, _tick(value), anchor="end")
        yield (
            f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" '
            'stroke="currentColor" stroke-opacity=".6"/>'
        )
        ticks = [step for step in _round_numbers(self._left, self._right) if step == int(step)]
        taken = 0.0
        for step in ticks:
            words = f"{step:,.0f}"
            half = LETTER * len(words) / 2
            x = min(self.x(step), WIDTH - half)
            if x - half > taken:
                yield text(x, bottom + 15, words, anchor="middle")
                taken = x + half
        yield text((LEFT + right) / 2, HEIGHT - 6, across, anchor="middle")

    def _values(self) -> list[float]:
        if self._log:
            exponents = range(max(-307, math.floor(self._low)), min(307, math.ceil(self._high)) + 1)
            marks = [m * 10.0**e for e in exponents for m in (1, 2, 5)]
            inside = [m for m in marks if self._low <= math.log10(m) <= self._high]
            tens = [m for m in inside if math.log10(m) == round(math.log10(m))]
            inside = tens[:: -(-len(tens) // TICKS)] if len(inside) > TICKS + 2 else inside
            return inside or [10 ** ((self._low + self._high) / 2)]
        return _round_numbers(self._low, self._high)


def _round_numbers(low: float, high: float) -> list[float]:
    """About `TICKS` round numbers from `low` to `high`."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.999 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _tick(value: float) -> str:
    words = f"{value:.6g}"
    return words if len(words) <= 8 else f"{value:.2e}"


def line_chart(curves: Sequence[Curve], chart: Chart) -> Iterator[str]:
    """A figure with all curves; nothing if none of them has a point."""
    drawn = [_usable(curve, logarithmic=chart.logarithmic) for curve in curves]
    values = [y for curve in drawn for _, y in curve if y is not None]
    if not values:
        return
    steps = [x for curve in drawn for x, _ in curve]
    frame = _Frame(
        (min(steps), max(steps)), (min(values), max(values)), logarithmic=chart.logarithmic
    )
    yield f"<figure><figcaption>{escape(chart.title)}</figcaption>"
    if chart.colours:
        yield legend(chart.colours)
    yield svg(WIDTH, HEIGHT)
    yield from frame.axes(chart.across)
    for curve, points in zip(curves, drawn, strict=True):
        yield from _curve(curve, points, frame, chart)
    for step, told in chart.crosses:
        x, y = frame.x(step), HEIGHT - BOTTOM - 5
        yield (
            f'<path d="M{x - 3:.1f} {y - 3}l6 6m0-6l-6 6" stroke="#d0342c" stroke-width="1.5">'
            f"<title>{escape(told)}</title></path>"
        )
    yield "</svg></figure>"


def _usable(curve: Curve, *, logarithmic: bool) -> list[Point]:
    if not logarithmic:
        return list(curve.points)
    return [(x, y if y is not None and y > 0 else None) for x, y in curve.points]


def _curve(curve: Curve, points: Sequence[Point], frame: _Frame, chart: Chart) -> Iterator[str]:
    """The lines between neighbouring values, and each point with its tooltip."""
    dashes = ' stroke-dasharray="5 3"' if curve.is_dashed else ""
    there = [[(x, y) for x, y in run if y is not None] for _, run in groupby(points, _is_gap)]
    for run in there:
        if len(run) > 1:
            line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in run)
            yield (
                f'<polyline points="{line}" fill="none" stroke="{curve.colour}" '
                f'stroke-width="1.6"{dashes}/>'
            )
    yield f'<g fill="{curve.colour}">'
    for run in there:
        for x, y in run:
            # A point without neighbours has no line, and would not be seen.
            shown = "" if curve.is_marked or len(run) == 1 else ' class="point"'
            told = f"{curve.name}, {chart.across} {x:g}: {chart.shown(y)}"
            yield (
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"{shown}>'
                f"<title>{escape(told)}</title></circle>"
            )
    yield "</g>"


def _is_gap(point: Point) -> bool:
    return point[1] is None


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points: of each stretch of steps the lowest and the highest.

    So no peak is lost. The first and the last point stay, and one gap of each stretch.
    """
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // max(2, most - 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        values = {n: y for n in stretch if (y := points[n][1]) is not None}
        if values:
            kept |= {min(values, key=values.__getitem__), max(values, key=values.__getitem__)}
        kept |= set([n for n in stretch if n not in values][:1])
    return [points[number] for number in sorted(kept)]


@dataclass(frozen=True)
class Column:
    """The parts of one column, which stand on each other."""

    first: float
    last: float
    """The first and the last step that it stands for."""
    parts: Mapping[str, float]


def column_chart(
    columns: Sequence[Column], colours: Mapping[str, str], chart: Chart
) -> Iterator[str]:
    """A figure of stacked columns; nothing if there are none.

    `colours` has the parts in the order in which they are stacked, from the bottom.
    """
    if not columns:
        return
    tallest = max(sum(column.parts.values()) for column in columns)
    frame = _Frame((columns[0].first - 0.5, columns[-1].last + 0.5), (0.0, tallest or 1.0))
    yield f"<figure><figcaption>{escape(chart.title)}</figcaption>"
    yield legend(colours)
    yield svg(WIDTH, HEIGHT)
    yield from frame.axes(chart.across)
    for column in columns:
        left, right = frame.x(column.first - 0.5), frame.x(column.last + 0.5)
        steps = f"{column.first:g}"
        if column.last > column.first:
            steps += f"–{column.last:g}"
        below = 0.0
        for name, colour in colours.items():
            value = column.parts.get(name, 0.0)
            if value <= 0:
                continue
            top, bottom = frame.y(below + value), frame.y(below)
            told = f"{name}, {chart.across} {steps}: {chart.shown(value)}"
            yield (
                f'<rect x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" '
                f'height="{bottom - top:.2f}" fill="{colour}"><title>{escape(told)}</title></rect>'
            )
            below += value
    yield "</svg></figure>"


def share_bars(rows: Sequence[tuple[str, float, str]], title: str, colour: str) -> Iterator[str]:
    """A figure of horizontal bars: a label, a share of 1, and what the tooltip says of each."""
    if not rows:
        return
    row = 16
    most = max(9, *(len(label) for label, _, _ in rows))
    left = min(LETTER * most + 8, WIDTH / 2)
    fits = int((left - 8) / LETTER)
    scale = WIDTH - left - LETTER * 8
    yield f"<figure><figcaption>{escape(title)}</figcaption>"
    yield svg(WIDTH, row * len(rows) + 4)
    for number, (label, share, told) in enumerate(rows):
        words = label if len(label) <= fits else "…" + label[1 - fits :]
        yield text(left - 6, row * number + 12, words, anchor="end")
        yield (
            f'<rect x="{left:.1f}" y="{row * number + 2}" width="{scale * share:.2f}" '
            f'height="{row - 4}" fill="{colour}"><title>{escape(told)}</title></rect>'
        )
        yield text(left + scale * share + 4, row * number + 12, f"{100 * share:.1f} %")
    yield "</svg></figure>"
