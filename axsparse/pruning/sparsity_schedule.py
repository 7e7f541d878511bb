"""Schedules: how sparse to be at a step, and how many weights to move there."""

from __future__ import annotations

import math


def gradual_sparsity(number: int, *, final: float, rounds: int) -> float:
    """The sparsity after `number` of `rounds` rounds; 0 before the first.

    s(r) = final · (1 − (1 − r / rounds)³): it rises fast at first (Zhu & Gupta 2017, eq. 1). After
    the last round it is exactly `final`.
    """
    assert 0 <= number <= rounds
    return final if number == rounds else final * (1 - (1 - number / rounds) ** 3)


def iterative_sparsity(number: int, *, final: float, rounds: int) -> float:
    """The sparsity after `number` of `rounds` rounds; 0 before the first.

    1 − s(r) = (1 − final)^(r / rounds): each round removes the same share of what is left
    (Frankle & Carbin 2019, section 1). After the last round it is exactly `final`.
    """
    assert 0 <= number <= rounds
    return final if number == rounds else 1 - (1 - final) ** (number / rounds)


def drop_fraction(step: int, *, alpha: float, end: int) -> float:
    """The share of kept weights that is dropped at a step, while as many grow elsewhere.

    f(t) = alpha / 2 · (1 + cos(π · t / end)) before `end` (Evci et al. 2020, section 3), then 0
    """
    return 0.0 if step >= end else alpha / 2 * (1 + math.cos(math.pi * step / end))
