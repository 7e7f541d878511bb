"""Cuts a list of layers into stages, so that the stage with most work has as little as possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Fits = Callable[[int, range], bool]
"""`fits(stage, layers)` says whether the stage of this number has memory for these layers."""
Combine = Callable[[float, float], float]
"""Joins the price of the stages so far with that of one more."""


def partition(costs: Sequence[float], stages: int, fits: Fits | None = None) -> list[range] | None:
    """Cut layers into contiguous, non-empty stages, so that the largest stage cost is smallest.

    `costs[n]` is the work of layer n. Of several such cuts, the one with the smallest sum of
    squared stage costs is taken, so that the other stages are balanced too; of those, the one
    with fewer layers in front. Returns the layers of each stage, or None if no cut fits.
    ValueError if there are fewer layers than stages. Dynamic programming, O(stages · layers²).
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    before = list(itertools.accumulate(costs, initial=0.0))
    known: dict[tuple[int, int, int], bool] = {}

    def fits_once(stage: int, start: int, stop: int) -> bool:
        """`fits`, asked at most once for each stage and range of layers."""
        key = (stage, start, stop)
        if key not in known:
            known[key] = fits is None or fits(stage, range(start, stop))
        return known[key]

    found = _best(before, stages, fits_once, lambda cost: cost, max)
    if found is None:
        return None
    dearest = found[0]

    def balanced(cost: float) -> float:
        return cost**2 if cost <= dearest else math.inf

    best = _best(before, stages, fits_once, balanced, lambda front, own: front + own)
    assert best is not None, "the first search has found such a cut"
    return [range(start, stop) for start, stop in itertools.pairwise((*best[1], layers))]


def _best(
    before: Sequence[float],
    stages: int,
    fits: Callable[[int, int, int], bool],
    price: Callable[[float], float],
    combine: Combine,
) -> tuple[float, tuple[int, ...]] | None:
    """The least combined price of a cut, and the first layer of each of its stages; None if no cut
    has a finite price.

    Of several such cuts, it is the one with the lowest first layers. `before[n]` is the cost of
    the first n layers.
    """
    layers = len(before) - 1
    # best[end] is the best cut of layers [0, end) into the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (price(before[end]), (0,))
        for end in range(1, layers + 1)
        if price(before[end]) < math.inf and fits(0, 0, end)
    }
    for stage in range(1, stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, layers + 1):
            for start, (front, starts) in best.items():
                if start >= end:
                    continue
                total = combine(front, price(before[end] - before[start]))
                candidate = (total, (*starts, start))
                better = total < math.inf and (end not in following or candidate < following[end])
                if better and fits(stage, start, end):
                    following[end] = candidate
        best = following
    return best.get(layers)


def split_by_hand(sizes: Sequence[int]) -> list[range]:
    """The layers of each stage, from the number of layers of each."""
    limits = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(limits)]
