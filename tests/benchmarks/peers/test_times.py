"""Times count only if losses agree, and of several settings the fastest counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from peers.launch import Failure
from peers.measuring import Measured, rounds_of
from peers.ratios import agrees, difference, digits, ratio_of, slope
from peers.times import fastest_variants, judge, speedups, time_rows
from peers.workload import DDP, FLOOR, FSDP2, OURS_SAMO, PLAIN, PLAIN_MASKED, SIZES, Case

DENSE, MASKED = [9.0, 8.0], [9.0, 8.5]
SAMO = OURS_SAMO.at(1, 2)


def run(seconds: float, losses: list[float], tokens: str = "0") -> dict[str, Any]:
    return {
        "median_seconds": seconds,
        "losses": losses,
        "tokens": tokens,
        "cpu_seconds": seconds,
        "foreign_share": 0.0,
        "peak_bytes_above_libraries": [1],
    }


def measured(**rows: dict[Case, dict[int, Any]]) -> Measured:
    return Measured(
        SIZES["tiny"],
        "fp32",
        {
            PLAIN: {0: run(2.0, DENSE), 1: run(4.0, DENSE)},
            PLAIN_MASKED: {0: run(2.2, MASKED), 1: run(4.4, MASKED)},
            **rows.get("more", {}),
        },
    )


def test_a_contender_whose_losses_differ_in_one_step_does_not_count() -> None:
    found = measured(more={DDP: {0: run(1.0, DENSE), 1: run(1.0, [9.0, 8.1])}})

    assert judge(found) == {DDP: "losses differ: 1.9 digits"}
    assert time_rows(found)[-1]["does not count"] == "losses differ: 1.9 digits"
    assert "milliseconds" not in time_rows(found)[-1]


def test_masked_runs_are_held_against_the_masked_reference() -> None:
    found = measured(more={SAMO: {0: run(1.0, MASKED)}})

    assert judge(found) == {}
    found.rows[SAMO][0] = run(1.0, DENSE)
    assert SAMO in judge(found)


def test_other_tokens_and_failures_do_not_count() -> None:
    found = measured(
        more={
            DDP: {0: run(1.0, DENSE, tokens="1")},
            SAMO: {0: run(1.0, MASKED), 1: Failure("process 0 ended with 1", "MemoryError")},
        }
    )

    assert judge(found) == {DDP: "read other tokens", SAMO: "no memory"}


def test_the_losses_of_the_floor_mean_nothing() -> None:
    assert judge(measured(more={FLOOR: {0: run(0.5, [9.0, 1.0])}})) == {}


def test_losses_that_masks_do_not_change_judge_nobody() -> None:
    found = measured()
    found.rows[PLAIN_MASKED] = {0: run(2.2, DENSE)}

    with pytest.raises(LookupError, match="cannot judge"):
        judge(found)


def test_without_a_reference_nobody_is_judged() -> None:
    found = measured()
    del found.rows[PLAIN]

    with pytest.raises(LookupError, match="plain torch 1x1 has not run"):
        judge(found)


def test_speedups_are_over_the_fastest_setting_of_a_peer() -> None:
    slow, fast, _ = FSDP2
    found = measured(
        more={
            slow: {0: run(3.0, DENSE)},
            fast: {0: run(1.8, DENSE)},
            SAMO: {0: run(1.0, MASKED)},
        }
    )

    assert fastest_variants(found, {})[fast.family] == fast
    [row] = speedups(found)
    assert (row["peer"], row["setting"]) == ("FSDP2", "resharded")
    assert row["times_as_fast"]["median"] == 1.8


def test_every_other_round_is_reversed() -> None:
    order = [case.name for case, _ in rounds_of([PLAIN, DDP], 3)]

    assert order == ["plain torch", "DDP", "DDP", "plain torch", "plain torch", "DDP"]


def test_a_ratio_is_the_median_over_common_rounds() -> None:
    # The machine was three times as slow in round 1: both suffered, and the ratio did not.
    found = ratio_of({0: 2.0, 1: 6.6, 2: 2.4}, {0: 1.0, 1: 3.0, 2: 1.0, 3: 9.0})

    assert found is not None
    assert (found.median, found.least, found.most) == pytest.approx((2.2, 2.0, 2.4))


def test_without_a_common_round_there_is_no_ratio() -> None:
    assert ratio_of({0: 1.0}, {1: 1.0}) is None


def test_the_worst_step_decides_about_losses() -> None:
    found = difference([9.0, 8.0, 7.0], [9.0, 8.0008, 7.0])

    assert found == pytest.approx(1e-4, rel=1e-3)
    assert digits(found) == "4.0"
    assert agrees(found, "bf16")
    assert not agrees(found, "fp32")


def test_equal_losses_agree_exactly() -> None:
    assert digits(difference([3.5], [3.5])) == "exact"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_agrees_with_nothing(bad: float) -> None:
    assert not agrees(difference([bad, 1.0], [1.0, 1.0]), "bf16")


def test_losses_of_other_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        difference([1.0], [1.0, 2.0])


def test_a_slope_counts_all_ranks_and_cancels_what_is_constant() -> None:
    assert slope([500, 700], [1300, 1500], (100, 200)) == 16.0
