"""The page: one file, well-formed, nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from support.planner_cases import cluster, formula

from axsparse.planner.choose import plan
from axsparse.planner.drawing import MOST_SPANS, page
from axsparse.planner.report import Answer
from axsparse.planner.timeline import spans


def answer(gpus: int = 16, name: str = "gpt", method: str = "samo") -> Answer:
    model = replace(formula("gpt3_xl.yaml", 0.1), name=name)
    found = plan(model, cluster(), gpus, global_batch_size=32, g_inter=[4], microbatch_sizes=[1])
    return Answer(method, found)


def drawn(text: str) -> ElementTree.Element:
    """The body, parsed strictly."""
    body = re.search(r"<body>.*</body>", text, re.DOTALL)
    assert body is not None
    return ElementTree.fromstring(body.group())  # noqa: S314 - our own text


def test_every_moment_of_a_replica_is_drawn_and_every_category_of_memory() -> None:
    found = answer()
    rectangles = list(drawn(page([found], [])).iter("rect"))

    replica = [span for span in spans(found.plan.recommended) if span.replica == 0]
    categories = 10
    assert len(rectangles) == len(replica) + 4 * categories
    titles = [rectangle.findtext("title") or "" for rectangle in rectangles]
    assert any(title.startswith("F0 (compute)") for title in titles)
    assert any(title.startswith("optimizer ") and title.endswith(" GB") for title in titles)


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


def test_a_long_timeline_is_cut() -> None:
    model = formula("gpt3_xl.yaml", 0.1)
    found = plan(model, cluster(), 4, global_batch_size=512, g_inter=[4], microbatch_sizes=[1])
    text = page([Answer("samo", found)], [])

    assert len(spans(found.recommended)) > MOST_SPANS
    assert text.count("<rect") <= MOST_SPANS + 40
