"""Charts, which matplotlib draws, and the common parts of all HTML pages: frame, tables, legends,
colours.

A chart is drawn as inline SVG of a page. Everywhere else it is only data: `Lines`, `Areas`, `Bars`
or `Timeline`. Its texts and axes have the colour of the page's text, in light and in dark.

A page is one file that loads nothing from elsewhere. It is readable in light and in dark, and 400
pixels wide. Neighbours differ in lightness, too.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy

from axsparse.observe.phases import PHASES
from axsparse.observe.trace_file import Span
from axsparse.runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

PHASE_COLOURS: Mapping[str, str] = {
    "data": "#1f6f8b",
    "compute": "#5aa9e6",
    "compress": "#9c4f12",
    "optimizer": "#f2b134",
    "p2p": "#7b3fa0",
    "bubble": "#c9ccd1",
    "collective": "#2e7d4f",
    "other": "#d98cb3",
}
SERIES_COLOURS = (
    *("#3178c6", "#e8a050", "#8a4fb0", "#4fbf90", "#b8433f", "#d0b040"),
    *("#2f7f5f", "#d98cb3", "#7a5230", "#8fb8e8", "#6b6b6b", "#c0d060"),
)
PICTURE_STYLE = """
svg { font-family: system-ui, sans-serif; stroke-linejoin: round; display: block;
  margin: .3em 0 1.2em; max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
.wide svg { max-width: none; }
.key { display: inline-block; max-width: 100%; margin-right: 1em; overflow-wrap: anywhere; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
"""
"""The style sheet of pictures and their legends; other pages that show them need it, too."""
PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --rule: #ddd; --soft: #666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #16181d; --rule: #3a3d44; --soft: #a2a6ad; }
}
body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1em; max-width: 1240px;
  color: var(--ink); background: var(--paper); }
.charts { display: grid; gap: 0 1.5em;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
.charts > figure { min-width: 0; }
figcaption { font-weight: 600; }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-variant-numeric: tabular-nums; }
td, th { padding: .15em .5em; text-align: right; border-bottom: 1px solid var(--rule); }
td:first-child, th:first-child { text-align: left; }
h1, h2, h3, li, p, td { overflow-wrap: anywhere; }
.wide td { overflow-wrap: normal; white-space: nowrap; }
.wide td.long { white-space: normal; overflow-wrap: anywhere; min-width: 16em; }
.many::before { content: "scrolls sideways →"; color: var(--soft); position: sticky; left: 0;
  display: none; }
@media (max-width: 700px) { .many::before { display: inline-block; } }
.note, .flat, summary { color: var(--soft); }
.flat { grid-column: 1 / -1; margin: .2em 0; }
figure { margin: 0; }
pre { overflow-x: auto; }
"""
PHONE = 44
"""Letters that fit next to each other on a telephone; a wider table says that it scrolls."""
LONG = 32
"""A text of a cell with more letters than this is broken into lines of half as many."""
Point = tuple[float, float | None]
"""A step, and a value; None where there is none, which interrupts the curve."""
WIDTH, HEIGHT = 400, 220
WIDE = 960
"""Pixels of a chart that scrolls sideways where the page is narrow."""
ROW = 18
COLUMNS = 2_000
"""The resolution of a timeline: in each column it shows the phase that takes most of it."""
LARGEST = 1e150
"""The largest value that is drawn: beyond it axes would overflow, and the loss of a run that
diverges grows without end."""
RED = "#d0342c"
INK = "#010203"
"""Stands for the colour of the page's text until the SVG is part of the page."""
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 10.5,
    "axes.titlesize": "medium",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.formatter.useoffset": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "axsparse",
    "figure.constrained_layout.h_pad": 0.05,
}
COLOURED: tuple[Any, ...] = (
    *("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
    "grid.color",
)


@dataclass(frozen=True)
class Curve:
    """One curve of a chart."""

    name: str
    points: Sequence[Point]
    colour: str
    is_dashed: bool = False
    is_marked: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves over steps."""

    title: str
    curves: Sequence[Curve]
    logarithmic: bool = False
    """Whether values lie on a logarithmic axis, which leaves out values that are not positive."""
    crosses: Sequence[float] = ()
    """Steps that are marked below the curves."""
    key: ClassVar[Mapping[str, str]] = {}
    size: ClassVar[tuple[float, float]] = (WIDTH, HEIGHT)

    @property
    def values(self) -> list[list[float]]:
        """The values of each curve that can be drawn."""
        return [
            [y for _, y in curve.points if y is not None and (y > 0 or not self.logarithmic)]
            for curve in self.curves
        ]

    @property
    def is_flat(self) -> bool:
        """Whether no curve has two different values, so that a sentence says it all."""
        return all(len(set(values)) <= 1 for values in self.values)

    def draw(self, axes: Axes) -> None:
        from matplotlib import ticker

        if self.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1, 0.4)))
        _number_steps(axes)
        for curve in self.curves:
            xs = [x for x, _ in curve.points]
            ys = [
                math.nan if y is None else max(-LARGEST, min(y, LARGEST)) for _, y in curve.points
            ]
            if self.logarithmic:
                ys = [y if y > 1 / LARGEST else math.nan for y in ys]
            axes.plot(
                *(xs, ys),
                color=curve.colour,
                linewidth=self._width(curve),
                linestyle="--" if curve.is_dashed else "-",
                marker="o",
                markersize=3.5,
                markevery=list(range(len(xs))) if curve.is_marked else _lonely(ys),
            )
        if self.crosses:
            across = axes.get_xaxis_transform()
            axes.plot(self.crosses, [0.04] * len(self.crosses), "x", color=RED, transform=across)

    def _width(self, curve: Curve) -> float:
        """The width of a curve: later ones are thinner, so that two equal curves are both seen."""
        alike = [one for one in self.curves if one.is_dashed == curve.is_dashed]
        return 1.4 + 4 * (1 - (1 + alike.index(curve)) / len(alike))


def _lonely(ys: Sequence[float]) -> list[int]:
    """The positions of values without a neighbour, so that no line goes through them."""
    known = [False, *map(math.isfinite, ys), False]
    return [n for n in range(len(ys)) if known[n + 1] and not known[n] and not known[n + 2]]


@dataclass(frozen=True)
class Areas:
    """Parts over steps, which stand on each other."""

    title: str
    edges: Sequence[float]
    """The beginning of each stretch of steps, and the end of the last one."""
    parts: Mapping[str, Sequence[float]]
    """For each stretch the value of a part, from the bottom."""
    key: Mapping[str, str]
    size: ClassVar[tuple[float, float]] = (WIDTH, HEIGHT)

    def draw(self, axes: Axes) -> None:
        _number_steps(axes)
        heights = [[*values, values[-1]] for values in self.parts.values()]
        colours = [self.key[name] for name in self.parts]
        axes.stackplot(self.edges, heights, colors=colours, step="post", linewidth=0)
        axes.set_xlim(self.edges[0], self.edges[-1])
        axes.set_ylim(bottom=0)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars of one or more parts, each bar with a name before and a text behind it."""

    title: str
    rows: Sequence[tuple[str, Sequence[float], str]]
    colours: Sequence[str]
    key: Mapping[str, str] = field(default_factory=dict)
    width: float = WIDTH

    @property
    def size(self) -> tuple[float, float]:
        return self.width, ROW * len(self.rows) + 8

    def draw(self, axes: Axes) -> None:
        fits = 18 if self.width == WIDTH else 40
        names = [n if len(n) <= fits else "…" + n[1 - fits :] for n, _, _ in self.rows]
        at = range(len(self.rows))
        for part, colour in enumerate(self.colours):
            values = [parts[part] for _, parts, _ in self.rows]
            left = [sum(parts[:part]) for _, parts, _ in self.rows]
            axes.barh(at, values, 0.75, left, color=colour)
        axes.set_yticks(at, names)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        longest = max((sum(parts) for _, parts, _ in self.rows), default=0.0) or 1.0
        for row, (_, _, words) in enumerate(self.rows):
            axes.text(1.02 * longest, row, words, va="center")
        axes.set_xlim(0, longest * (1.22 if self.width == WIDTH else 1.1))
        _bare(axes)


@dataclass(frozen=True)
class Timeline:
    """The spans of one replica in one step, a row for each stage."""

    title: str
    spans: Sequence[Span]
    length: float
    """The end of the step, which begins at 0."""
    key: Mapping[str, str] = field(default_factory=lambda: PHASE_COLOURS)

    @property
    def stages(self) -> int:
        return 1 + max(span.stage for span in self.spans)

    @property
    def size(self) -> tuple[float, float]:
        return WIDE, ROW * self.stages + 30

    def draw(self, axes: Axes) -> None:
        from matplotlib.colors import to_rgba

        colours = [to_rgba(PHASE_COLOURS[phase]) for phase in PHASES]
        rows = numpy.asarray([*colours, (0.0,) * 4])[self._phases()]
        # A bare line below each row keeps it apart from the next one.
        bars = numpy.repeat(rows, ROW, axis=0)
        bars[ROW - 1 :: ROW] = 0.0
        extent = (0.0, self.length, self.stages - 0.5, -0.5)
        axes.imshow(bars, extent=extent, aspect="auto", interpolation="none")
        letter = self.length / 130  # 130 letters fit next to each other
        for span in self.spans:
            if span.phase == "compute" and span.end - span.begin > letter * (len(span.name) + 1):
                axes.text(span.begin + letter / 2, span.stage, span.name, color="#111", va="center")
        axes.set_yticks(range(self.stages), [f"stage {n}" for n in range(self.stages)])
        axes.set_xlim(0, self.length)
        axes.set_ylim(self.stages - 0.5, -0.5)
        _bare(axes)
        length = f"{self.length:.3g} s"
        axes.set_xticks([0, self.length], ["0", length])
        axes.xaxis.get_majorticklabels()[-1].set_horizontalalignment("right")

    def _phases(self) -> NDArray[numpy.int_]:
        """The number of the phase that takes most of each column, for each stage; -1 for none."""
        edges = numpy.linspace(0.0, self.length, COLUMNS + 1)
        seconds = numpy.zeros((self.stages, len(PHASES), COLUMNS))
        for span in self.spans:
            inside = numpy.diff(numpy.clip(edges, span.begin, span.end))
            seconds[span.stage, PHASES.index(span.phase)] += inside
        return numpy.where(seconds.any(axis=1), seconds.argmax(axis=1), -1)


def _number_steps(axes: Axes) -> None:
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("step")


def _bare(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.grid(visible=False)


Chart = Lines | Areas | Bars | Timeline


def check_installed(where: str) -> None:
    """ConfigError, which begins with `where`, if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{where}: charts are drawn by matplotlib, which is not installed; pip install "
            "'axsparse[plot]'"
        )


def chart_html(chart: Chart) -> Iterator[str]:
    """A figure of a page; a sentence if nothing changes, and nothing if there is nothing."""
    if isinstance(chart, Lines) and chart.is_flat:
        pairs = zip(chart.curves, chart.values, strict=True)
        said = ", ".join(f"{curve.name} {values[0]:.6g}" for curve, values in pairs if values)
        if said:
            yield f'<p class="flat">{escape(f"{chart.title}: {said} at every step")}</p>'
        return
    yield f"<figure><figcaption>{escape(chart.title)}</figcaption>"
    if chart.key:
        yield legend(chart.key)
    is_wide = chart.size[0] > WIDTH
    yield f'<div class="wide">{svg(chart)}</div>' if is_wide else svg(chart)
    yield "</figure>"


def svg(chart: Chart) -> str:
    """A chart as an SVG element, without title and legend."""
    import matplotlib
    from matplotlib.figure import Figure

    width, height = chart.size
    file = io.BytesIO()
    with (
        matplotlib.rc_context({**STYLE, **dict.fromkeys(COLOURED, INK)}),
        warnings.catch_warnings(),
    ):
        # Names may have letters that its font lacks; a browser has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure((width / 72, height / 72), layout="constrained")
        chart.draw(figure.subplots())
        unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=unnamed)
    text = file.getvalue().decode()
    text = text[text.index("<g ") : text.rindex("</svg>")]
    text = re.sub(r"<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    # Several charts are in one page: groups keep no names, and fonts are the page's.
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href", "href")
    text = re.sub(r" font-family: [^;\"]*;", "", text).replace(INK, "currentColor")
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", re.sub(r">\s+<", "><", text))
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img" aria-label="{escape(chart.title)}" fill="currentColor">{text}</svg>'
    )


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points: of each stretch of steps the lowest and the highest. So no peak
    is lost. The first and the last point stay, and one gap of each stretch."""
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


# -- pages ----------------------------------------------------------------------------------


PAGE_MARK = '<meta name="generator" content="axsparse">'


def page(title: str, lines: Iterable[str]) -> str:
    """The text of a page; `lines` are HTML."""
    body = "\n".join(lines)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{PAGE_STYLE}{PICTURE_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table that scrolls sideways where the page is narrow; all texts are escaped here."""
    rows = list(rows)
    letters = (map(len, column) for column in zip(heads, *rows, strict=True))
    widths = [max(LONG // 2 if n >= LONG else n for n in column) + 2 for column in letters]
    yield f'<div class="wide{" many" if sum(widths) > PHONE else ""}" tabindex="0"><table><tr>'
    yield "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    for row in rows:
        classes = (' class="long"' if len(text) >= LONG else "" for text in row)
        cells = (f"<td{of}>{escape(text)}</td>" for of, text in zip(classes, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table></div>"


def legend(colours: Mapping[str, str]) -> str:
    """The names of series next to their colours, in the order of the mapping."""
    key = '<span class="key"><i style="background:{}"></i>{}</span>'
    return f"<div>{''.join(key.format(c, escape(name)) for name, c in colours.items())}</div>"
