"""The simulator and split backwards against table 5 of the zero-bubble paper (Qi et al., 2024)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.action_text import dry_run, to_text
from zero_bubble import PUBLISHED, published, zb_h1


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.exhaustive if int(line.split()[2]) >= 96 else ())
        for line in PUBLISHED.splitlines()
    ],
)
def test_a_row_of_the_table_comes_out(line: str) -> None:
    [row] = published(line)
    known: dict[str, Any] = row["published"]
    found: dict[str, Any] = row["simulated"]

    assert found["1F1B"] == pytest.approx(known["1F1B"], abs=2e-4)
    assert found["ZB-H1"] == pytest.approx(known["ZB-1p"], abs=2e-4)
    assert found["1p"] < known["1F1B"]
    # Scores of attention go with the backward, so a deferred microbatch takes less than half.
    assert found["2p in bytes"] <= known["ZB-2p"] + 0.0032


def test_zb_h1_of_three_stages_and_four_microbatches() -> None:
    assert [to_text(zb_h1(stage, 3, 4)) for stage in range(3)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 4))
def test_zb_h1_never_waits_for_ever_and_holds_no_more_than_1f1b(
    stages: int, microbatches: int, slack: int
) -> None:
    most = dry_run([zb_h1(stage, stages, microbatches, slack) for stage in range(stages)])

    assert max(most) <= min(microbatches, stages + slack)
