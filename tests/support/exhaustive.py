"""Which cases of a matrix `make test` runs; those marked `exhaustive` wait for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def by_default(usual: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`; those that are not among the usual ones are exhaustive."""
    return [case if case in usual else _exhaustive(case) for case in cases]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """The product of the axes for `parametrize`, of which `make test` has each value once.

    The n-th usual case takes the n-th value of every axis; shorter axes begin again.
    """
    longest = max(map(len, axes))
    usual = [tuple(axis[n % len(axis)] for axis in axes) for n in range(longest)]
    return by_default(usual, itertools.product(*axes))


def _exhaustive(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
