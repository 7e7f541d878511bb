"""Learning rates of every step: a linear rise, then the chosen descent."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from axsparse.config.schema import ScheduleConfig
from axsparse.samo.optim.optimizer import learning_rate

Decay = Literal["cosine", "linear", "constant", "step"]


def rate(step: int, decay: Decay = "cosine", *, warmup: int = 4, end: int = 12) -> float:
    schedule = ScheduleConfig(
        warmup_steps=warmup, decay=decay, final_ratio=0.1, step_every=3, step_factor=0.5
    )
    return learning_rate(step, schedule, peak=2.0, decay_steps=end)


COSINE_AT_TWO_EIGHTHS = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 2 / 8)) / 2)


@pytest.mark.parametrize(
    ("decay", "warmup", "end", "expected"),
    [
        ("cosine", 4, 12, {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0}),  # equal parts, to the peak
        ("cosine", 0, 12, {0: 2.0}),
        ("cosine", 4, 12, {6: COSINE_AT_TWO_EIGHTHS, 8: 1.1, 12: 0.2, 500: 0.2}),
        ("linear", 4, 12, {8: 1.1, 12: 0.2, 500: 0.2}),
        ("constant", 4, 12, {8: 2.0, 12: 2.0, 500: 2.0}),
        ("step", 0, 12, dict(enumerate([2, 2, 2, 1, 1, 1, 0.5]))),
        # counted from the first step of the run
        ("step", 4, 12, dict(enumerate([0.5, 1, 1.5, 2, 1, 1, 0.5])) | {30: 2 * 0.5**10}),
        ("cosine", 4, 4, {4: 2.0, 5: 0.2}),  # over one step after a warm-up that ends it
    ],
)
def test_rates_of_steps(decay: Decay, warmup: int, end: int, expected: dict[int, float]) -> None:
    for step, value in expected.items():
        assert rate(step, decay, warmup=warmup, end=end) == pytest.approx(value), step
