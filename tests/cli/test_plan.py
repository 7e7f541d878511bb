"""The command: what it prints and writes, and its one-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line

from axsparse.observe.trace_file import read
from axsparse.planner.cluster import load_cluster
from axsparse.runtime.errors import EXIT_CONFIG

SMALL = [
    *("--config", "quickstart.yaml", "--cluster", "laptop"),
    *("--set", "model.hidden_size=64", "--set", "model.num_layers=2"),
]


@pytest.fixture
def plan(axsparse: Axsparse) -> Axsparse:
    """`plan("--gpus", "4")`: exit code, screen and errors of a small model's plan."""
    return lambda *words: axsparse("plan", *SMALL, *words)


def test_it_prints_a_recommendation_and_why(plan: Axsparse) -> None:
    code, screen, _ = plan("--gpus", "4")

    assert code == 0
    assert "quickstart (samo) in bf16 on 4 devices of laptop, 3.0 GB each" in screen
    assert "recommended: 1 stage × 4 replicas" in screen
    assert "because the fewest stages fit: 0.3 GB of 3.0 GB" in screen
    assert "step over slack: 0: " in screen
    assert (
        "note: training by itself takes 2 stages × 2 replicas: where layout.memory_per_rank sets "
        "no limit, layout.g_inter: auto takes 2 stages if 2 divides the ranks"
    ) in screen


def test_members_are_tried_as_asked_for_and_what_training_does_by_itself_is_said(
    plan: Axsparse,
) -> None:
    small = ("layout.memory_per_rank=0.0026", "layout.g_inter=1", "samo.enabled=false")
    asked = ("--microbatch-size=1", *(f"--set={one}" for one in small))
    fewer, one = plan("--gpus", "4", *asked)[1], plan("--gpus", "4", "--members", "1")[1]
    summit = plan("--gpus", "6", "--members", "1,2", "--cluster", "summit")[1]

    assert "recommended: 1 stage × 2 members × 2 replicas" in fewer
    assert "note: training by itself takes as many members as layout.g_tensor says, 1; " in fewer
    assert "member" not in one
    assert "note: no two GPUs have trained with several members of a stage so far: " in summit


@pytest.mark.parametrize("wish", ["layout.split=[4]", "layout.memory_per_rank=2"])
def test_where_training_takes_the_same_it_says_nothing(wish: str, plan: Axsparse) -> None:
    _, screen, _ = plan("--gpus", "4", "--set", wish)

    assert "recommended: 1 stage × 4 replicas" in screen
    assert "training by itself" not in screen


def test_a_cluster_file_to_begin_with_is_printed(axsparse: Axsparse, tmp_path: Path) -> None:
    code, screen, _ = axsparse("plan", "--print-cluster", "a100-pod")
    mine = tmp_path / "mine.yaml"
    mine.write_text(screen)

    assert code == 0
    assert replace(load_cluster(str(mine)), name="a100-pod") == load_cluster("a100-pod")


def test_without_a_cluster_it_says_which_one_it_took(axsparse: Axsparse, plan: Axsparse) -> None:
    asked = ("plan", "--config", "quickstart.yaml", "--gpus", "1")
    limit = ("--set", "layout.memory_per_rank=1e-6")

    screen = axsparse(*asked)[1].splitlines()
    assert "on 1 device of laptop" in screen[0]
    assert screen[-1] == (
        "note: no --cluster, hence planned for the bundled cluster laptop; benchmarks/calibrate.py "
        "measures one of your own"
    )
    assert "no --cluster" not in plan("--gpus", "1")[1]
    # Nor is it silent where nothing fits.
    assumed = "; laptop was taken, since no --cluster is named\n"
    assert axsparse(*asked, *limit)[2].endswith(assumed)
    assert assumed not in plan("--gpus", "1", *limit)[2]


def test_json_is_one_object_with_both_methods(plan: Axsparse) -> None:
    _, screen, _ = plan("--gpus", "2", "--compare", "dense,samo", "--json")

    plans = json.loads(screen)["plans"]
    assert [told["method"] for told in plans] == ["dense", "samo"]
    first = [told["rows"][0]["stages"][0]["memory"]["optimizer"] for told in plans]
    assert first[0] > first[1]


def test_trace_and_page_are_written(plan: Axsparse, tmp_path: Path) -> None:
    trace, page = tmp_path / "step.json", tmp_path / "plan.html"
    _, screen, _ = plan("--gpus", "2", "--json", "--trace", trace, "--html", page)

    [told] = json.loads(screen)["plans"]
    spans = read(trace)
    seconds = max(span.end for span in spans) - min(span.begin for span in spans)
    assert seconds == pytest.approx(told["rows"][0]["step_seconds"])
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_only_the_microbatches_that_were_asked_for_are_tried(
    plan: Axsparse,
) -> None:
    _, screen, _ = plan("--gpus", "2", "--microbatch-size", "3,5,60", "--json")

    [told] = json.loads(screen)["plans"]
    assert {row["microbatch_size"] for row in told["rows"]} == {3, 5}
    reasons = {row["reason"] for row in told["rejected"]}
    assert "microbatches of 60 make too few of a batch of 48" in reasons


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--gpus", "many"], "argument --gpus: 'many' is no whole number from 1 to"),
        (["--gpus", "0"], "argument --gpus: '0' is no whole number"),
        (["--gpus", "2", "--microbatch-size", "-1"], "argument --microbatch-size: '-1' is no"),
        (["--gpus", "2", "--members", "two"], "argument --members: 'two' is no whole number"),
        (["--gpus", "2", "--compare", "best"], "argument --compare: 'best' is not of dense,samo"),
        (["--gpus", "2", "--cluster", "nowhere"], "cluster 'nowhere': no such file and no bundled"),
        (["--gpus", "2", "--set", "layout.memory_per_rank=1e-6"], "stage 0 needs "),
        (
            ["--gpus", "2", "--html", "/nowhere/plan.html"],
            "--html /nowhere/plan.html: cannot be written (No such file or directory); "
            "choose another place",
        ),
        ([], "the following arguments are required: --gpus"),
        (["--print-cluster", "sumit"], "cluster 'sumit': no such file and no bundled cluster of "),
    ],
)
def test_mistakes_are_one_line(plan: Axsparse, args: list[str], text: str) -> None:
    code, _, errors = plan(*args)

    assert code != 0
    assert_one_line((code, "", errors), code, text)


def test_what_fits_nowhere_in_a_study_is_left_out_unless_all_is(
    plan: Axsparse,
) -> None:
    limit = "--set=layout.memory_per_rank=0.0026"
    dense = ("--set=samo.enabled=false", "--set=pipeline.slack=1", "--microbatch-size=1", limit)
    code, screen, errors = plan("--gpus", "1,4", *dense)
    nothing, _, _ = plan("--gpus", "1,2", "--set", "layout.memory_per_rank=1e-6")

    assert (code, nothing) == (0, EXIT_CONFIG)
    assert errors.startswith("axsparse: start: gpus: quickstart fits no layout of 1 device ")
    assert [row.split()[1] for row in screen.splitlines()[2:]] == ["devices", "4"]
