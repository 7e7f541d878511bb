"""The page: one file, well-formed, nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
from support.pictures import boxes, outside, overlapping
from support.planner_cases import cluster, formula

from axsparse.planner.html_page import MOST_SPANS, page
from axsparse.planner.layout import LayoutQuestion
from axsparse.planner.layout_search import plan
from axsparse.planner.plan_report import MethodPlan, lines
from axsparse.planner.timeline import spans


@cache
def answer(gpus: int = 16, name: str = "gpt", method: str = "samo") -> MethodPlan:
    model = replace(formula("gpt3_xl.yaml", 0.1), name=name)
    found = plan(
        LayoutQuestion(
            workload=model,
            cluster=cluster(),
            gpus=gpus,
            global_batch_size=32,
            g_inter=[4],
            microbatch_sizes=[1],
        )
    )
    return MethodPlan(method, found)


def drawn(text: str) -> ElementTree.Element:
    """The body, parsed strictly."""
    body = re.search(r"<body>.*</body>", text, re.DOTALL)
    assert body is not None
    return ElementTree.fromstring(body.group())  # noqa: S314 - our own text


def test_every_moment_of_a_replica_is_drawn_and_every_category_of_memory() -> None:
    found = answer()
    rectangles = list(drawn(page([found], [])).iter("rect"))

    replica = [span for span in spans(found.plan.recommended) if span.replica == 0]
    categories = 11
    assert len(rectangles) == len(replica) + 4 * categories
    titles = [rectangle.findtext("title") or "" for rectangle in rectangles]
    assert any(title.startswith("F0 (compute)") for title in titles)
    assert sum(title.startswith("stage 3: optimizer ") for title in titles) == 1


def test_names_are_escaped() -> None:
    evil = "<script>alert('x')</script>&"
    text = page([answer(name=evil, method=evil)], [evil])

    assert "<script" not in text
    drawn(text)


def test_nothing_comes_from_elsewhere() -> None:
    text = page([answer(8), answer(16)], ["a note"])

    assert not re.search(r"https?:|src=|href=|url\(|@import|<link|<img", text)


def test_several_numbers_of_devices_have_a_scaling_curve_of_each_method() -> None:
    answers = [answer(n, method=m) for n in (8, 16) for m in ("dense", "samo")]
    one, two = page(answers[:1], []), page(answers, [])

    assert "Strong scaling" not in one
    curves = drawn(two).iter("polyline")
    with_two_points = [c for c in curves if len((c.get("points") or "").split()) == 2]
    assert len(with_two_points) >= 2
    assert "Strong scaling" in two
    dashed = [line for line in drawn(two).iter("line") if line.get("stroke-dasharray")]
    assert len(dashed) == 2
    for line in dashed:  # half the time is as far down as twice the devices is to the right
        assert float(line.get("x2") or 0) > float(line.get("x1") or 0)
        assert float(line.get("y2") or 0) > float(line.get("y1") or 0)
    assert ">seconds a step<" in two


def test_tables_have_the_phases_and_the_memory_of_the_terminal() -> None:
    found = answer()
    heads, *rows = ([cell.text for cell in row] for row in drawn(page([found], [])).iter("tr"))
    printed = "\n".join(lines([found], []))

    assert {"compute", "p2p", "bubble", "collective"} <= set(heads)
    assert ["stage", "layers", "weight"] in [row[:3] for row in rows]
    for row in rows:
        assert all((cell or "") in printed for cell in row if cell != "total, GB")


def test_a_long_timeline_is_cut() -> None:
    model = formula("gpt3_xl.yaml", 0.1)
    found = plan(
        LayoutQuestion(
            workload=model,
            cluster=cluster(),
            gpus=4,
            global_batch_size=512,
            g_inter=[4],
            microbatch_sizes=[1],
        )
    )
    text = page([MethodPlan("samo", found)], [])

    assert len(spans(found.recommended)) > MOST_SPANS
    assert text.count("<rect") <= MOST_SPANS + 44


@pytest.fixture(scope="module")
def crowded() -> ElementTree.Element:
    """Two methods of almost the same speed, a curve of 33 slacks, microbatches of three digits."""
    near = [answer(n, method=m) for n in (8, 16, 32) for m in ("dense", "samo")]
    model = replace(formula("gpt3_xl.yaml"), layers=32)
    roomy = cluster(memory_bytes=1e12)
    deep = plan(
        LayoutQuestion(
            workload=model,
            cluster=roomy,
            gpus=32,
            global_batch_size=128,
            g_inter=[32],
            microbatch_sizes=[1],
        )
    )
    assert len(deep.slack_curve) == 33
    return drawn(page([*near, MethodPlan("dense", deep)], []))


def test_nothing_is_drawn_outside_its_picture(crowded: ElementTree.Element) -> None:
    for drawing in crowded.iter("svg"):
        assert outside(drawing) == []


def test_no_label_lies_on_another(crowded: ElementTree.Element) -> None:
    for drawing in crowded.iter("svg"):
        assert overlapping(drawing) == []


def test_a_label_stays_in_its_rectangle(crowded: ElementTree.Element) -> None:
    for drawing in crowded.iter("svg"):
        filled = [
            [float(each.attrib[key]) for key in ("x", "y", "width", "height")]
            for each in drawing.iter("rect")
        ]
        for text, box in zip(drawing.iter("text"), boxes(drawing), strict=True):
            if text.get("fill") == "#111":
                assert any(
                    x <= box[0] and box[2] <= x + w and y <= box[1] and box[3] <= y + h
                    for x, y, w, h in filled
                )


def test_every_point_of_a_curve_tells_its_figures(crowded: ElementTree.Element) -> None:
    tips = [circle.findtext("title") or "" for circle in crowded.iter("circle")]

    assert "step, 0 slack: " in " ".join(tips) and "step, 32 slack: " in " ".join(tips)
    assert all(tip.endswith(" s") for tip in tips)
