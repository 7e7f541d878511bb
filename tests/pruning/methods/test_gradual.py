"""Sparsities follow the published formulas and end exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.pruning.methods.gradual import gradual_sparsity, iterative_sparsity

PUBLISHED = [
    (gradual_sparsity, [0, *(0.9 * (1 - left**3) for left in (0.75, 0.5, 0.25)), 0.9]),
    (iterative_sparsity, [0, *(1 - 0.1 ** (done / 4) for done in (1, 2, 3)), 0.9]),
]


@pytest.mark.parametrize(("sparsity", "expected"), PUBLISHED)
def test_sparsities_are_those_of_the_papers(
    sparsity: Callable[..., float], expected: list[float]
) -> None:
    found = [sparsity(number, final=0.9, rounds=4) for number in range(5)]

    assert found == pytest.approx(expected)


@pytest.mark.parametrize("sparsity", [gradual_sparsity, iterative_sparsity])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(final=st.floats(0, 1, exclude_max=True), rounds=st.integers(1, 100))
def test_pruning_never_brings_back_and_ends_exactly(
    sparsity: Callable[..., float], final: float, rounds: int
) -> None:
    found = [sparsity(number, final=final, rounds=rounds) for number in range(rounds + 1)]

    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.0, final)
    assert all(0 <= sparsity < 1 for sparsity in found)
