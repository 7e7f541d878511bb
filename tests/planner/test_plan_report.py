"""The reports of a plan: in words and as JSON."""

from __future__ import annotations

import json
from functools import cache

import pytest
from support.planner_cases import cluster, of_three_axes, planned

from axsparse.planner.layout_search import Plan, Rejection
from axsparse.planner.plan_report import (
    MOST_ROWS,
    as_json,
    because,
    comparison,
    lines,
    rejections,
    scaling,
    settings,
)
from axsparse.planner.stage_memory import gigabytes


@cache
def answer(gpus: int = 64, density: float = 1.0, **constants: float) -> Plan:
    machine = cluster(**constants)
    return planned("gpt3_2.7b.yaml", density, machine, gpus=gpus, global_batch_size=128)


def test_the_recommended_layout_comes_first_with_its_margin_and_the_rest_by_time() -> None:
    found = answer()
    text = list(lines([found], ["a note"]))

    used = gigabytes(found.recommended.most_bytes)
    assert text[0] == f"fits: 4 stages × 16 replicas, {used} of 17.18 GB, recomputing activations"
    assert text[2] == "gpt3_2.7b (dense) in fp16 on 64 devices of summit, 17.2 GB each"
    rows = text[5 : 5 + min(MOST_ROWS, len(found.rows))]
    assert rows[0].split()[:3] == ["4", "×", "16"]
    assert "+0.0" in rows[0].split()
    options = settings(found)
    assert f"recommended: 4 stages × 16 replicas, microbatches of 1, {options}" in text
    assert text[-1] == "note: a note"
    # Memory by category adds up.
    begin = text.index("memory of each stage, GB:")
    heads, first = text[begin + 1].split(), text[begin + 2].split()
    values = dict(zip(reversed(heads), reversed(first), strict=False))
    parts = sum(float(values[name]) for name in heads[2:-1])
    assert float(values["total"]) == pytest.approx(parts, rel=0.01)


def test_it_says_why_fewer_stages_do_not_do_or_that_more_are_predicted_faster() -> None:
    found = answer()
    [last] = [r.reason for r in found.rejected if r.g_inter == 2]
    assert because(found).startswith(f"fewer stages do not do (with 2: {last})")
    assert "GB of 17.2" in last

    # Without fast cards, many replicas reduce for ever.
    found = answer(memory_bytes=1e12, nic_bandwidth=1e8)
    fastest = min(found.rows, key=lambda row: row.seconds).layout
    assert because(found).startswith("the fewest stages fit: ")
    assert f"; {fastest.grid} with microbatches of {fastest.microbatch_size} are" in because(found)


def test_the_third_axis_is_shown_where_stages_have_several_members() -> None:
    alone, shared = (list(lines([of_three_axes(each)], [])) for each in (1, 2))

    assert any(line.startswith("1 × 8 ") for line in alone)
    assert any(line.startswith("1 × 2 × 4 ") for line in shared)
    assert any("--set layout.g_tensor=2 " in line for line in shared)


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


def test_methods_are_compared_by_the_papers_reduction_and_scaling_against_the_fewest() -> None:
    dense, samo, large = answer(), answer(density=0.1), answer(128)
    compared, scaled = list(comparison([dense, samo])), list(scaling([dense, large]))

    first = dense.recommended.seconds
    assert [row.split()[0] for row in compared] == ["method", "dense", "samo"]
    assert compared[2].split()[-1] == f"{100 * (1 - samo.recommended.seconds / first):.1f}"
    efficiency = f"{100 * first / large.recommended.seconds / 2:.0f}"
    assert [row.split()[-1] for row in scaled[1:]] == ["100", efficiency]


def test_json_has_all_and_is_json() -> None:
    found = answer()
    told = json.loads(json.dumps(as_json(found)))

    assert len(told["rows"]) == len(found.rows)
    first = told["rows"][0]
    assert first["margin"] == 0
    assert sum(first["phases"].values()) == pytest.approx(first["step_seconds"])
    assert told["rejected"][0]["reason"].startswith("stage ")
    assert told["constants"]["efficiency"]["kind"] == "fitted"
    memory = first["stages"][0]["memory"]
    assert memory["total"] == pytest.approx(sum(memory.values()) / 2)
