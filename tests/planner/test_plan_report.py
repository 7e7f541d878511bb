"""What a plan says, in words and in JSON."""

from __future__ import annotations

import json
from functools import cache

import pytest
from support.planner_cases import cluster, formula

from axsparse.planner.layout import LayoutQuestion
from axsparse.planner.layout_search import Rejection, plan
from axsparse.planner.plan_report import (
    MOST_ROWS,
    MethodPlan,
    as_json,
    because,
    comparison,
    lines,
    rejections,
    scaling,
    settings,
    table,
)


@cache
def answer(
    gpus: int = 64, density: float = 1.0, method: str = "dense", **constants: float
) -> MethodPlan:
    found = plan(
        LayoutQuestion(
            workload=formula("gpt3_2.7b.yaml", density),
            cluster=cluster(**constants),
            gpus=gpus,
            global_batch_size=128,
        )
    )
    return MethodPlan(method, found)


def test_the_recommended_layout_comes_first_with_its_margin_and_the_rest_by_time() -> None:
    found = answer()
    text = list(lines([found], ["a note"]))

    assert text[0] == "gpt3_2.7b.yaml (dense) in fp16 on 64 devices of summit, 17.2 GB each"
    rows = text[3 : 3 + min(MOST_ROWS, len(found.plan.rows))]
    assert rows[0].split()[:3] == ["8", "×", "8"]
    assert "+0.0" in rows[0].split()
    assert (
        f"recommended: 8 stages × 8 replicas, microbatches of 1, {settings(found.plan.recommended)}"
        in text
    )
    assert text[-1] == "note: a note"


def test_it_says_why_fewer_stages_do_not_do() -> None:
    found = answer().plan
    [last] = [r.reason for r in found.rejected if r.g_inter == 4]

    assert because(found).startswith(f"fewer stages do not do (with 4: {last})")
    assert "GB of 17.2" in last


def test_it_says_when_a_layout_of_more_stages_is_predicted_faster() -> None:
    # Without fast cards, many replicas reduce for ever.
    found = answer(memory_bytes=1e12, nic_bandwidth=1e8).plan
    fastest = min(found.rows, key=lambda row: row.seconds)

    assert because(found).startswith("the fewest stages fit: ")
    assert (
        f"; {fastest.layout.grid} with microbatches of {fastest.layout.microbatch_size} are"
        in because(found)
    )


def test_memory_of_stages_is_told_by_category_and_adds_up() -> None:
    text = list(lines([answer()], []))
    begin = text.index("memory of each stage, GB:")
    heads, first = text[begin + 1].split(), text[begin + 2].split()
    values = dict(zip(reversed(heads), reversed(first), strict=False))

    parts = sum(float(values[name]) for name in heads[2:-1])
    assert float(values["total"]) == pytest.approx(parts, rel=0.01)


def test_of_many_stages_the_fullest_and_the_last_are_shown() -> None:
    found = plan(
        LayoutQuestion(
            workload=formula("gpt3_13b.yaml"),
            cluster=cluster(),
            gpus=32,
            global_batch_size=32,
            g_inter=[32],
        )
    )
    text = list(lines([MethodPlan("dense", found)], []))
    begin = text.index("memory of each stage, GB:")

    assert [line.split()[0] for line in text[begin + 2 : begin + 9]] == [*"012345", "31"]


def test_neighbours_that_are_rejected_alike_share_a_line() -> None:
    found = [
        Rejection(1, 8, 1, "stage 0 needs 3 GB of 2"),
        Rejection(4, 2, None, "too many"),
        Rejection(8, 1, None, "too many"),
    ]

    assert list(rejections(found)) == [
        "  1 stage, microbatches of 1: stage 0 needs 3 GB of 2",
        "  4, 8 stages: too many",
    ]


def test_methods_are_compared_by_the_papers_reduction() -> None:
    dense, samo = answer(), answer(density=0.1, method="samo")
    rows = list(comparison([dense, samo]))

    expected = 1 - samo.plan.recommended.seconds / dense.plan.recommended.seconds
    assert rows[2].split()[-1] == f"{100 * expected:.1f}"
    assert [row.split()[0] for row in rows] == ["method", "dense", "samo"]


def test_scaling_is_efficient_against_the_fewest_devices() -> None:
    small, large = answer(64), answer(128)
    rows = list(scaling([small, large]))

    expected = small.plan.recommended.seconds / large.plan.recommended.seconds / 2
    assert rows[1].split()[-1] == "100"
    assert rows[2].split()[-1] == f"{100 * expected:.0f}"


def test_json_has_all_and_is_json() -> None:
    found = answer()
    told = json.loads(json.dumps(as_json(found)))

    assert len(told["rows"]) == len(found.plan.rows)
    assert told["rows"][0]["margin"] == 0
    assert sum(told["rows"][0]["phases"].values()) == pytest.approx(told["rows"][0]["step_seconds"])
    assert told["rejected"][0]["reason"].startswith("stage ")
    assert told["slack_curve"][0]["slack"] == 0
    assert told["constants"]["efficiency"]["kind"] == "fitted"
    memory = told["rows"][0]["stages"][0]["memory"]
    assert memory["total"] == pytest.approx(sum(memory.values()) / 2)


def test_words_stand_left_and_numbers_right() -> None:
    assert list(
        table([{"phase": "a", "layout": "1", "s": "1"}, {"phase": "b", "layout": "16", "s": "20"}])
    ) == [
        "phase  layout   s",
        "    a  1        1",
        "    b  16      20",
    ]
