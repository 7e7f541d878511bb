"""Learning rates of every step: a linear rise, then the chosen descent."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.config.schema import ScheduleConfig
from axsparse.samo.optim.learning_rate import learning_rate

Decay = Literal["cosine", "linear", "constant", "step"]
examples = settings(max_examples=100, deadline=None, derandomize=True)


def rate(step: int, decay: Decay = "cosine", *, warmup: int = 4, end: int = 12) -> float:
    schedule = ScheduleConfig(
        warmup_steps=warmup, decay=decay, final_ratio=0.1, step_every=3, step_factor=0.5
    )
    return learning_rate(step, schedule, peak=2.0, decay_steps=end)


def test_the_rate_rises_in_equal_parts_to_its_peak_at_the_end_of_the_warm_up() -> None:
    assert [rate(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert rate(0, warmup=0) == 2.0


@pytest.mark.parametrize(
    ("decay", "halfway", "end"), [("cosine", 1.1, 0.2), ("linear", 1.1, 0.2), ("constant", 2, 2)]
)
def test_halfway_and_at_the_end_of_the_descent(decay: Decay, halfway: float, end: float) -> None:
    assert rate(8, decay) == pytest.approx(halfway)
    assert rate(12, decay) == pytest.approx(end)
    assert rate(500, decay) == pytest.approx(end)


def test_the_cosine_descends_along_its_curve() -> None:
    expected = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 2 / 8)) / 2)
    assert rate(6) == pytest.approx(expected)


def test_steps_fall_at_once_and_are_counted_from_the_first_of_the_run() -> None:
    assert [rate(step, "step", warmup=0) for step in range(7)] == [2, 2, 2, 1, 1, 1, 0.5]
    assert [rate(step, "step") for step in range(7)] == [0.5, 1, 1.5, 2, 1, 1, 0.5]
    assert rate(30, "step") == 2 * 0.5**10


def test_a_descent_that_ends_with_the_warm_up_is_over_one_step_later() -> None:
    assert rate(4, warmup=4, end=4) == 2.0
    assert rate(5, warmup=4, end=4) == pytest.approx(0.2)


@examples
@given(
    st.integers(0, 60),
    st.integers(0, 20),
    st.integers(20, 50),
    st.sampled_from(["cosine", "linear"]),
)
def test_after_the_warm_up_the_rate_never_rises_and_stays_within_its_bounds(
    step: int, warmup: int, end: int, decay: Decay
) -> None:
    now, following = (rate(s, decay, warmup=warmup, end=end) for s in (step, step + 1))

    assert 0 < now <= 2.0
    if step >= warmup:
        assert 0.2 * (1 - 1e-12) <= following <= now
