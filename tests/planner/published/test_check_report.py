"""The report of a check: JSON of the given form, table, picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.published_runs import run, selene

from axsparse.planner.cluster import load_cluster
from axsparse.planner.published.check_report import as_json, lines, picture, scoreboard
from axsparse.planner.published.run_check import Check, check_runs
from axsparse.planner.published.run_file import RunFile, bundled_tables, load_runs


def check() -> Check:
    told = run(published={"seconds_per_step": 2.0, "memory_gb": 10.0, "fits": False})
    twice = run(published={"seconds_per_step": 1.0}).published
    fitted = told.model_copy(update={"fit": True, "name": "fitted", "published": twice})
    silent = run().model_copy(update={"name": "<silent>"})
    rows = [fitted, told, silent]
    return check_runs(RunFile("a & b", "selene-a100", "a paper", rows), selene())


def test_json_has_the_given_form() -> None:
    found = as_json([check()])

    assert list(found) == ["rows", "mean", "worst"]
    for row in found["rows"]:
        assert list(row) == ["name", "predicted", "published", "error", "fits"]
    fitted, told, silent = found["rows"]
    assert told["error"] == told["predicted"] / told["published"] - 1
    assert found["mean"] == found["worst"] == abs(told["error"])
    assert told["fits"] is True
    assert (silent["published"], silent["error"]) == (None, None)
    assert fitted["name"] == "fitted"


def test_the_table_says_what_was_fitted_and_what_would_explain_a_miss() -> None:
    text = "\n".join(lines(check()))

    assert "a & b on selene-a100\nsource: a paper\n" in text
    assert "range 0.2 to 0.98)" in text
    assert "of 1 predicted rows; memory within " in text
    assert "yes (published no)" in text
    [told] = [line for line in text.splitlines() if line.split()[:1] == ["run"]]
    assert " × " in told


def test_the_scoreboard_has_a_line_for_each_table() -> None:
    head, first, second = scoreboard([check(), check()])

    assert head.split()[:2] == ["table", "cluster"]
    assert first == second
    assert first.split()[:3] == ["a", "&", "b"]


@pytest.mark.exhaustive
def test_the_page_has_the_scoreboard_as_it_is_printed() -> None:
    files = [load_runs(path) for path in bundled_tables()]
    found = scoreboard([check_runs(file, load_cluster(file.cluster)) for file in files])

    page = Path(__file__).parents[3] / "docs" / "reference" / "scoreboard.md"
    assert "\n".join(found) in page.read_text(encoding="utf-8")


def test_the_picture_has_a_point_for_each_published_step() -> None:
    root = ElementTree.fromstring(picture([check()]))  # noqa: S314 - our own text
    [points] = [group for group in root.iter() if group.get("id") == "PathCollection_1"]

    filled = [str(use.get("style")) for use in points.iter() if use.tag.endswith("use")]
    assert ["fill: none" in style for style in filled] == [True, False]
