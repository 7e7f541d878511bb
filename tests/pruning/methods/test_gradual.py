"""Sparsities and drop fractions follow the published formulas and end exactly."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.pruning.methods.gradual import gradual_sparsity, iterative_sparsity
from axsparse.pruning.methods.regrowth import drop_fraction

examples = settings(max_examples=150, deadline=None, derandomize=True)
finals = st.floats(0, 1, exclude_max=True)


# -- gradual --------------------------------------------------------------------------------


def test_gradual_pruning_follows_the_cubic_of_the_paper() -> None:
    found = [gradual_sparsity(number, final=0.8, rounds=4) for number in range(5)]

    assert found == pytest.approx(
        [0, 0.8 * (1 - 0.75**3), 0.8 * (1 - 0.5**3), 0.8 * (1 - 0.25**3), 0.8]
    )


@examples
@given(finals, st.integers(1, 100))
def test_gradual_pruning_never_brings_back_and_ends_exactly(final: float, rounds: int) -> None:
    found = [gradual_sparsity(number, final=final, rounds=rounds) for number in range(rounds + 1)]

    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.0, final)


# -- iterative ------------------------------------------------------------------------------


def test_each_round_removes_the_same_share_of_what_is_left() -> None:
    density = [1 - iterative_sparsity(number, final=0.9, rounds=4) for number in range(5)]

    assert density[0] == 1
    assert [after / before for before, after in itertools.pairwise(density)] == (
        pytest.approx([0.1**0.25] * 4)
    )


@examples
@given(finals, st.integers(1, 20))
def test_the_last_round_ends_at_the_sparsity_that_was_asked_for(final: float, rounds: int) -> None:
    found = [iterative_sparsity(number, final=final, rounds=rounds) for number in range(rounds + 1)]

    assert found[0] == 0
    assert found[-1] == final
    assert all(0 <= sparsity < 1 for sparsity in found)


# -- drop and grow --------------------------------------------------------------------------


def test_the_drop_fraction_falls_as_half_a_cosine() -> None:
    found = [drop_fraction(step, alpha=0.3, end=100) for step in (0, 25, 50, 75, 99)]

    assert found == pytest.approx(
        [0.3, 0.15 * (1 + math.sqrt(0.5)), 0.15, 0.15 * (1 - math.sqrt(0.5)), 7.4e-5], rel=1e-2
    )


@pytest.mark.parametrize("step", [100, 101, 250])
def test_from_the_end_on_nothing_is_dropped(step: int) -> None:
    assert drop_fraction(step, alpha=0.3, end=100) == 0.0
