"""Some of the golden runs (`make golden` has all), and what their comparison reports."""

from __future__ import annotations

import pytest
from golden.golden import Golden, Table, differences, fingerprint, main
from support.exhaustive import by_default

USUAL = (["^(1x1|2x2 exact, sharded|1x1 pattern 2 of 4)$"], 4)
OTHERS = [
    # As in test_state_equivalence.py, and in test_public_face.py.
    (["^(1x1|2x1|1x2|2x2)$", "--with", "samo.weights=sparse"], 4),
    (["^2x2 own model$"], 2),  # and 1x1, whose settings texts are compared with
]
TABLE = Table.read("base: {}\nrows: {one: {}, two: {same: one}}")


@pytest.mark.parametrize(("words", "rows"), by_default([USUAL], [USUAL, *OTHERS]))
def test_runs_match_the_golden_file(
    words: list[str], rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--rows", *words])

    said = capsys.readouterr().out
    assert code == 0, f"{said}\nintended? make golden ARGS=--update"
    assert f"{rows} rows: values of 0 differ" in said


def results(loss: float, *, machine: str | None = None, screen: str = "banner") -> Golden:
    values = {"loss": [4.0, loss], "grad_norm": [1.0], "validation": [], "weights": [7]}
    texts = {"config": ["seed: 1"], "screen": [screen]}
    return Golden(
        {"one": texts, "two": texts}, {machine or fingerprint(): {"one": values, "two": {**values}}}
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
