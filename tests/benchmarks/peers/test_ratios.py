"""Ratios are taken within rounds; losses agree or do not."""

from __future__ import annotations

import math

import pytest
from peers.ratios import agrees, difference, digits, ratio_of, slope


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
