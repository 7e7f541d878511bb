"""Which layers stand on which stage: contiguous, every layer once, the dearest stage cheapest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Fits = Callable[[int, range], bool]
"""`(stage, layers)`: whether a stage of this number can hold these layers."""
Combine = Callable[[float, float], float]


def partition(costs: Sequence[float], stages: int, fits: Fits | None = None) -> list[range] | None:
    """Cut layers into contiguous non-empty stages with the smallest possible dearest stage.

    Among equal cuts the one with the smallest sum of squared stage costs, so that the rest
    is balanced too; then the one with fewer layers in front. Dynamic programming,
    O(stages · layers²). None if no cut fits. ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    before = list(itertools.accumulate(costs, initial=0.0))
    known: dict[tuple[int, int, int], bool] = {}

    def held(stage: int, start: int, stop: int) -> bool:
        """`fits`, asked once for each stage."""
        key = (stage, start, stop)
        if key not in known:
            known[key] = fits is None or fits(stage, range(start, stop))
        return known[key]

    found = _best(before, stages, held, lambda cost: cost, max)
    if found is None:
        return None
    dearest = found[0]

    def balanced(cost: float) -> float:
        return cost**2 if cost <= dearest else math.inf

    best = _best(before, stages, held, balanced, lambda front, own: front + own)
    assert best is not None, "the cut with this dearest stage is one of them"
    return [range(start, stop) for start, stop in itertools.pairwise((*best[1], layers))]


def _best(
    before: Sequence[float],
    stages: int,
    held: Callable[[int, int, int], bool],
    price: Callable[[float], float],
    combine: Combine,
) -> tuple[float, tuple[int, ...]] | None:
    """The least combined price and the starts of its stages; of equal ones the lowest starts.

    `before[n]` is the cost of the first n layers.
    """
    layers = len(before) - 1
    # best[end]: of layers [0, end) on the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (price(before[end]), (0,))
        for end in range(1, layers + 1)
        if price(before[end]) < math.inf and held(0, 0, end)
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
                if better and held(stage, start, end):
                    following[end] = candidate
        best = following
    return best.get(layers)


def split_by_hand(sizes: Sequence[int]) -> list[range]:
    """The stages of a given number of layers each, in order."""
    limits = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(limits)]
