"""Which layers stand on which stage: contiguous, every layer once, the dearest stage cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Cut layers into contiguous non-empty stages with the smallest possible dearest stage.

    Among equal cuts the one with the smallest sum of squared stage costs, so that the
    rest is balanced too; then the one with fewer layers in front. Dynamic programming,
    O(stages · layers²). ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    # best[end] = (dearest stage, sum of squares, starts) of layers [0, end) on the stages so far
    best: list[tuple[float, float, tuple[int, ...]] | None]
    best = [None] + [(before[end], before[end] ** 2, (0,)) for end in range(1, layers + 1)]
    for _ in range(1, stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (layers + 1)
        for end in range(1, layers + 1):
            for start in range(1, end):
                front = best[start]
                if front is None:
                    continue
                cost = before[end] - before[start]
                found = (max(front[0], cost), front[1] + cost**2, (*front[2], start))
                known = following[end]
                if known is None or found < known:
                    following[end] = found
        best = following
    chosen = best[layers]
    assert chosen is not None
    starts = [*chosen[2], layers]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def split_by_hand(sizes: Sequence[int]) -> list[range]:
    """The stages of a given number of layers each, in order."""
    stages = []
    start = 0
    for size in sizes:
        stages.append(range(start, start + size))
        start += size
    return stages
