"""How often `checkpoint.every: auto` saves."""

from __future__ import annotations

import pytest

from axsparse.training.checkpoint.interval import SaveInterval, best_interval, expected_loss


@pytest.mark.parametrize(
    ("cost", "between_failures"), [(0.1, 86400.0), (5.0, 86400.0), (30.0, 3600.0), (300.0, 3600.0)]
)
def test_no_other_interval_loses_less(cost: float, between_failures: float) -> None:
    best = best_interval(cost, between_failures)
    least = expected_loss(cost, best, between_failures)

    for factor in (0.5, 0.8, 1.25, 2.0):
        assert expected_loss(cost, factor * best, between_failures) > least


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_save_comes_for_a_second_and_later_ones_for_what_was_measured() -> None:
    clock = Clock()
    interval = SaveInterval(24.0, clock)
    asked = []
    for _ in range(3):
        while not interval.asks():
            clock.now += 1.0
        asked.append(clock.now)
        interval.begin()
        interval.end(0.01)

    assert asked == [416.0, 416.0 + 42.0, 416.0 + 2 * 42.0]


def test_the_interval_is_told_once_and_again_when_it_has_changed() -> None:
    clock = Clock()
    interval = SaveInterval(24.0, clock)
    for _ in range(200):
        clock.now += 0.5
        interval.asks()
    interval.begin()

    assert interval.end(0.1) == (
        "checkpoint.every auto: a save holds the run up for 0.1 s; with a failure every 24 h "
        "(checkpoint.mtbf_hours) one every 02:11, some 263 steps, loses least: 0.15 % of the time, "
        "and each restart"
    )
    assert interval.end(0.1) is None
    assert interval.end(0.4) is None  # the median of two is 0.1 and 0.25
    said = [interval.end(0.4) for _ in range(4)]
    assert [text is not None for text in said].count(True) == 1
