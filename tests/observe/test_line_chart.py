"""Charts: all points are there, axes have round numbers, no text lies on another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

import pytest
from support.pictures import outside, overlapping

from axsparse.observe.line_chart import (
    Chart,
    Column,
    Curve,
    Point,
    column_chart,
    line_chart,
    share_bars,
    thinned,
)


def drawn(lines: Iterable[str]) -> ElementTree.Element:
    return ElementTree.fromstring("\n".join(lines))  # noqa: S314


def chart(points: list[Point], **how: bool) -> ElementTree.Element:
    return drawn(line_chart([Curve("one", points, "#000000")], Chart("loss", **how)))  # type: ignore[arg-type]


def test_a_gap_interrupts_the_line_and_a_lone_point_is_seen() -> None:
    found = chart([(1, 5.0), (2, 4.0), (3, None), (4, 3.0), (5, None), (6, 2.0), (7, 1.0)])

    lines = [len((line.get("points") or "").split()) for line in found.iter("polyline")]
    assert lines == [2, 2]
    circles = list(found.iter("circle"))
    assert [circle.findtext("title") for circle in circles] == [
        "one, step 1: 5",
        "one, step 2: 4",
        "one, step 4: 3",
        "one, step 6: 2",
        "one, step 7: 1",
    ]
    assert [circle.get("class") for circle in circles].count(None) == 1


@pytest.mark.parametrize(
    "points",
    [
        [(7, 3.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, 1e-300), (248_000, 1e300)],
        [(1, -3.0), (2, 5.0)],
        [(1, 1.0), (2, 1.0 + 1e-15)],
        [(10**6 + n, 1e-5 * n) for n in range(30)],
        [(0, 3e-5), (1, 2.99e-5)],
    ],
)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_axes_fit_any_values(points: list[Point], logarithmic: bool) -> None:
    lines = list(
        line_chart([Curve("x", points, "#000000")], Chart("loss", logarithmic=logarithmic))
    )
    if logarithmic and all((y or 0) <= 0 for _, y in points):
        assert lines == []
        return
    picture = next(drawn(lines).iter("svg"))
    assert outside(picture) == []
    assert overlapping(picture) == []
    assert 2 <= len(list(picture.iter("text"))) <= 25


def test_higher_values_stand_higher_and_later_steps_further_right() -> None:
    circles = list(chart([(1, 1.0), (2, 10.0), (3, 100.0)], logarithmic=True).iter("circle"))

    xs, ys = ([float(c.attrib[key]) for c in circles] for key in ("cx", "cy"))
    assert xs == sorted(xs)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[0] > ys[1]


def test_thinning_keeps_ends_peaks_and_gaps() -> None:
    points: list[Point] = [(n, 1.0 + n % 7 / 100) for n in range(10_000)]
    points[4321], points[7000] = (4321, 99.0), (7000, None)

    kept = thinned(points, 200)

    assert len(kept) <= 205
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {(4321, 99.0), (7000, None)} <= set(kept)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert thinned(points[:200], 200) == points[:200]


def test_columns_stand_on_each_other_in_the_order_of_the_legend() -> None:
    colours = {"work": "#111111", "wait": "#999999"}
    columns = [Column(1, 2, {"wait": 1.0, "work": 3.0}), Column(3, 3, {"work": 2.0, "wait": 0.0})]
    found = drawn(column_chart(columns, colours, Chart("time", shown="{:g} s".format)))

    rectangles = list(found.iter("rect"))
    titles = [r.findtext("title") for r in rectangles]
    assert titles == ["work, step 1–2: 3 s", "wait, step 1–2: 1 s", "work, step 3: 2 s"]
    work, wait, later = (
        {k: float(r.attrib[k]) for k in ("x", "y", "height", "width")} for r in rectangles
    )
    assert wait["y"] + wait["height"] == pytest.approx(work["y"], abs=0.02)
    assert work["height"] == pytest.approx(3 * wait["height"], abs=0.05)
    assert work["width"] == pytest.approx(2 * later["width"], abs=0.05)
    assert outside(next(found.iter("svg"))) == []


def test_bars_have_labels_of_any_length() -> None:
    rows = [("a" * 200, 1.0, "all"), ("b", 0.0, "nothing"), ("block<0>", 0.5, "half")]
    found = drawn(share_bars(rows, "sparsity", "#444444"))

    picture = next(found.iter("svg"))
    assert outside(picture) == [] and overlapping(picture) == []
    widths = [float(r.attrib["width"]) for r in found.iter("rect")]
    assert widths[1] == 0 and widths[0] == pytest.approx(2 * widths[2], abs=0.02)
    assert re.search(r"…a+", found.findtext("svg/text") or "")
