"""Charts: every point is drawn, axes fit any values, and a page can take them as they are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from axsparse.observe.charts import Areas, Bars, Curve, Lines, Point, Timeline, svg, thinned
from axsparse.observe.phases import PHASES
from axsparse.observe.trace_file import Span

EVIL = "<script>alert('x')</script>&\"--> $x^2$ 名"


def lines(points: list[Point], *, logarithmic: bool = False) -> Lines:
    return Lines("loss", [Curve("one", points, "#3178c6")], logarithmic=logarithmic)


def texts(drawn: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(drawn).iter("text")]  # noqa: S314


def spans(count: int) -> list[Span]:
    """Ten long spans of computing, each behind `count` short ones of waiting and messages."""
    found, now = [], 0.0
    for block in range(10):
        for n in range(count):
            phase = "bubble" if n % 3 else "p2p"
            found.append(Span(1, 0, block % 2, phase, phase, now, now + 1 / count))
            now += 1 / count
        found.append(Span(1, 0, block % 2, "compute", f"F{block}", now, now + 1.0))
        now += 1.0
    return found


@pytest.mark.parametrize(
    "points",
    [
        [(7, 3.0)],
        [(1, 0.0), (2, 1.0)],
        [(1, 1e-300), (248_000, 1e300)],
        [(1, -3.0), (2, 5.0)],
        [(1, 1.0), (2, 1.0 + 1e-15)],
        [(10**6 + n, 1e-5 * n) for n in range(30)],
        [(0, 3e-5), (1, 2.99e-5)],
        [(1, None), (2, 2.0), (3, None)],
    ],
)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_axes_fit_any_values(points: list[Point], logarithmic: bool) -> None:
    drawn = svg(lines(points, logarithmic=logarithmic))

    assert 2 <= len(texts(drawn)) <= 25 and "step" in texts(drawn)
    assert "nan" not in drawn


def test_a_gap_interrupts_a_curve_and_a_lone_point_is_seen() -> None:
    axes = Figure().subplots()

    lines([(1, 5.0), (2, 4.0), (3, None), (4, 3.0), (5, None), (6, 2.0), (7, 1.0)]).draw(axes)

    [curve] = axes.lines
    assert numpy.isnan(numpy.asarray(curve.get_ydata(), float)).tolist() == [
        *(False, False, True, False, True, False, False)
    ]
    assert curve.get_markevery() == [3]


def test_thinning_keeps_ends_peaks_and_gaps() -> None:
    points: list[Point] = [(n, 1.0 + n % 7 / 100) for n in range(10_000)]
    points[4321], points[7000] = (4321, 99.0), (7000, None)

    kept = thinned(points, 200)

    assert len(kept) <= 205
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {(4321, 99.0), (7000, None)} <= set(kept)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert thinned(points[:200], 200) == points[:200]


def test_areas_stand_on_each_other_from_the_first_edge_to_the_last() -> None:
    axes = Figure().subplots()
    parts = {"work": [3.0, 2.0], "wait": [1.0, 0.0]}

    Areas("time", [0.5, 2.5, 3.5], parts, {"work": "#111", "wait": "#999"}).draw(axes)

    work, wait = (area.get_paths()[0].get_extents() for area in axes.collections)
    assert (work.x0, work.x1, work.y0, work.y1) == (0.5, 3.5, 0, 3)
    assert (wait.y0, wait.y1) == (2, 4)
    assert axes.get_xlim() == (0.5, 3.5)


def test_bars_have_names_and_values() -> None:
    rows = [("a" * 200, [1.0, 2.0], "3 B"), ("b", [0.0, 0.0], "0 B"), (EVIL, [0.5, 0.0], "half")]
    chart = Bars("memory", rows, ["#444444", "#999999"])
    axes = Figure().subplots()
    chart.draw(axes)

    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [1.0, 0.0, 0.5, 2.0, 0.0, 0.0]
    assert [bar.get_x() for bar in bars][3:] == [1.0, 0.0, 0.5]
    words = texts(svg(chart))
    assert {"b", "3 B", "0 B", "half"} <= set(words)
    assert any(re.fullmatch("…a+", word) for word in words)


def test_a_timeline_shows_what_takes_most_of_each_column_and_names_long_actions() -> None:
    few, many = (Timeline("step", spans(n), 20.0) for n in (3, 2_000))

    names = ["none" if phase < 0 else PHASES[phase] for phase in many._phases()[0]]
    assert [names[at] for at in (50, 149, 250, 550, 1_750, 1_950)] == [
        *("bubble", "compute", "none", "compute", "compute", "none")
    ]
    assert 495 <= names.count("compute") <= 505 and names.count("p2p") <= 5
    assert PHASES.index("p2p") in few._phases()[0]
    drawn = svg(many)
    words = texts(drawn)
    assert {"stage 0", "stage 1", "0", "20 s", *(f"F{n}" for n in range(10))} == set(words)
    assert len(drawn) < 60_000
