"""Some of the golden runs (`make golden` has all), and what their comparison reports."""

from __future__ import annotations

from typing import Any

import pytest
from golden.golden import Golden, Table, differences, fingerprint, main, updated

USUAL = r"^(1x1|2x1|2x2 exact, sharded|1x1 pattern 2 of 4|2x2 own model)$"
TABLE = Table.read("base: {}\nrows: {one: {}, two: {same: one}}")


def test_usual_runs_match_the_golden_file(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--rows", USUAL])

    said = capsys.readouterr().out
    assert code == 0, f"{said}\nintended? make golden ARGS=--update"
    assert "6 rows: values of 0 differ, texts of 0" in said


def results(loss: float, *, machine: str | None = None, screen: str = "banner") -> Golden:
    values = {"loss": [4.0, loss], "grad_norm": [1.0], "validation": [], "weights": [7]}
    texts = {"config": ["seed: 1"], "screen": [screen]}
    return Golden(
        {"one": texts, "two": texts},
        {machine or fingerprint(): {"one": values, "two": {**values}}},
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "values", "texts"),
    [
        (results(3.0), results(3.0), [], []),
        (results(3.0), results(3.0000001), ["loss 2 is 3.0, not 3.0000001"], []),
        (results(3.0), results(3.0000001, machine="other"), [], []),
        (results(3.0), results(3.1, machine="other"), ["loss 2 is 3.0, not 3.1 ± 0.001 of it"], []),
        (results(3.0), results(3.0, screen="before"), [], ["-before", "+banner"]),
    ],
    ids=["same", "a bit", "another machine", "beyond the tolerance", "a text"],
)
def test_comparison_reports_values_and_texts_apart(
    ours: Golden, theirs: Golden, values: list[str], texts: list[str]
) -> None:
    expected = {"values": values, "texts": texts}

    assert differences(TABLE, ours, theirs) == {"one": expected, "two": expected}


def test_row_that_fails_is_reported_by_its_reason_alone() -> None:
    ours = results(3.0, screen="other")
    ours.bits[fingerprint()]["one"] = {"failed": "exit code 70"}

    found = differences(TABLE, ours, results(3.0))

    assert found["one"] == {"values": ["exit code 70"], "texts": []}


def test_rows_that_are_the_same_are_compared_on_every_machine() -> None:
    ours = results(3.0)
    two: dict[str, Any] = ours.bits[fingerprint()]["two"]
    two["weights"] = [8]

    found = differences(TABLE, ours, results(3.0, machine="other"))

    assert found["two"]["values"] == ["weights 1 is 8, not 7, as in row 'one'"]


def test_update_drops_values_of_other_machines_that_no_longer_hold() -> None:
    here = fingerprint()
    old = results(3.0)
    old.bits["other"] = results(3.0).bits[here]

    assert set(updated(TABLE, results(3.0), old).bits) == {here, "other"}
    assert set(updated(TABLE, results(3.0000001), old).bits) == {here}
