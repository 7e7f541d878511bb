"""A figure is better or worse than an old one only beyond the spread of both."""

from __future__ import annotations

import pytest
from figures import Figure, compare


def seconds(*values: float, **more: bool) -> dict[str, object]:
    return Figure(values, "s", **more).row()


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((0.80, 0.85, 0.90), "better"),
        ((1.20, 1.25, 1.30), "worse"),
        ((0.90, 0.94, 1.01), "same"),  # 6 % less, and the ranges overlap
        ((0.99, 1.06, 1.10), "same"),  # 6 % more, and the ranges overlap
    ],
)
def test_ranges_that_overlap_are_the_same(new: tuple[float, ...], verdict: str) -> None:
    assert compare(seconds(*new), seconds(0.95, 1.00, 1.05)) == verdict


def test_more_may_be_better() -> None:
    assert compare(seconds(2.0, more_is_better=True), seconds(1.0, more_is_better=True)) == "better"


def test_of_exact_figures_every_difference_counts() -> None:
    assert compare(seconds(3.601, is_exact=True), seconds(3.6, is_exact=True)) == "worse"
