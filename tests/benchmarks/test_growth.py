"""Exponents of curves: growth that is faster than asked for stands out."""

from __future__ import annotations

import pytest
from growth import exponent, exponents


def test_the_exponent_of_a_power_is_found() -> None:
    assert exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)


def test_a_square_behind_a_constant_stands_out_in_the_last_doubling() -> None:
    found = exponents({x: 10.0 + 0.1 * x**2 for x in (1, 2, 4, 8, 16, 32)}, expected=1.0)

    assert found["exponent"] < 1.0  # over the whole curve the constant hides it
    assert found["stands_out"]


def test_a_line_does_not_stand_out() -> None:
    assert not exponents({x: 2.0 + x for x in (1, 2, 4, 8)}, expected=1.0)["stands_out"]


def test_nothing_sent_has_no_exponent() -> None:
    assert exponent([1, 2], [0.0, 0.0]) is None
