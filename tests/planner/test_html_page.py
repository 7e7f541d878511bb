"""The page: one file, well-formed, nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

from support.pages import body_of, figure_of
from support.planner_cases import cluster, formula

from axsparse.planner.html_page import page
from axsparse.planner.layout import LayoutQuestion
from axsparse.planner.layout_search import plan
from axsparse.planner.plan_report import MethodPlan, lines


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


def texts(figure: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in figure.iter("text")]


def test_a_step_and_the_memory_of_every_stage_are_drawn() -> None:
    drawn = page([answer()], [])

    step = texts(figure_of(drawn, "A step"))
    assert {"stage 0", "stage 3", "B3"} <= set(step)
    memory = figure_of(drawn, "Memory of a rank")
    assert [word for word in texts(memory) if "stage" in word] == [f"stage {n}" for n in range(4)]
    assert sum("GB" in word for word in texts(memory)) == 5
    assert any(word.startswith("limit ") for word in texts(memory))
    assert "optimizer" in [key.tail or "" for key in memory.iter("i")]


def test_names_are_escaped_and_nothing_comes_from_elsewhere() -> None:
    evil = "<script>alert('x')</script>&"
    text = page([answer(8, name=evil, method=evil), answer(name=evil, method=evil)], [evil])

    assert "<script" not in text
    body_of(text)
    assert not re.search(r"https?:|src=|href=\"(?!#|data:)|url\((?!#)|@import|<link|<img", text)


def test_several_numbers_of_devices_have_a_scaling_curve_of_each_method() -> None:
    answers = [answer(n, method=m) for n in (8, 16) for m in ("dense", "samo")]

    assert "Strong scaling" not in page(answers[:1], [])
    scaling = figure_of(page(answers, []), "Strong scaling")
    assert {"8", "16", "devices"} <= set(texts(scaling))
    assert [key.tail for key in scaling.iter("i")] == ["dense", "samo"]


def test_tables_have_the_phases_and_the_memory_of_the_terminal() -> None:
    found = answer()
    rows = ([cell.text for cell in row] for row in body_of(page([found], [])).iter("tr"))
    heads, *rest = rows
    printed = "\n".join(lines([found], []))

    assert {"compute", "p2p", "bubble", "collective"} <= set(heads)
    assert ["stage", "layers", "weight"] in [row[:3] for row in rest]
    for row in rest:
        assert all((cell or "") in printed for cell in row if cell != "total, GB")


def test_a_step_of_thousands_of_moments_makes_no_large_page() -> None:
    model = replace(formula("gpt3_xl.yaml"), layers=32)
    deep = plan(
        LayoutQuestion(
            workload=model,
            cluster=cluster(memory_bytes=1e12),
            gpus=32,
            global_batch_size=512,
            g_inter=[32],
            microbatch_sizes=[1],
        )
    )
    text = page([MethodPlan("dense", deep)], [])

    assert len(text) < 200_000
    assert "slack" in texts(figure_of(text, "Seconds of a step over slack"))
