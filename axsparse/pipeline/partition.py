"""Cuts a list of layers into stages, so that the stage with most work has as little as possible."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Fits = Callable[[int, range], bool]
"""`fits(stage, layers)` says whether the stage of this number has memory for these layers. A stage
without memory for some layers has none for these and a further layer either."""


def partition(costs: Sequence[float], stages: int, fits: Fits | None = None) -> list[range] | None:
    """Cut layers into contiguous, non-empty stages, so that the largest stage cost is smallest.

    `costs[n]` is the work of layer n. Of several such cuts, the one with the smallest sum of
    squared stage costs is taken, so that the other stages are balanced too; of those, the one
    with fewer layers in front. Returns the layers of each stage, or None if no cut fits.
    ValueError if there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    balanced = _cheapest(costs, [[layers] * layers] * stages)
    if fits is None or balanced is None or all(itertools.starmap(fits, enumerate(balanced))):
        return balanced
    # Some cut may fit that is less balanced.
    return _cheapest(costs, [_ends(fits, stage, stages, layers) for stage in range(stages)])


def _ends(fits: Fits, stage: int, stages: int, layers: int) -> list[int]:
    """For each first layer of a stage the furthest end that fits, of those which a cut may need."""
    if stage == stages - 1:
        first = bisect_left(range(layers), True, key=lambda n: fits(stage, range(n, layers)))
        return [0] * first + [layers] * (layers - first)
    last = layers - (stages - 1 - stage)  # the stages that follow have a layer each
    own = range(stage + 1, last + 1)
    end = stage + bisect_left(own, True, key=lambda n: not fits(stage, range(stage, n)))
    found = [*[0] * stage, end, *[0] * (layers - stage - 1)]
    for start in range(stage + 1, last if stage else 0):
        end = max(end, start)  # neighbouring starts have close ends
        while end > start and not fits(stage, range(start, end)):
            end -= 1
        while end < last and fits(stage, range(start, end + 1)):
            end += 1
        found[start] = end
    return found


def _cheapest(costs: Sequence[float], furthest: Sequence[Sequence[int]]) -> list[range] | None:
    """The best cut whose stages end at `furthest[stage][start]` at the latest.

    Dynamic programming from the last stage on, once for the largest cost and once, within it, for
    the sum of squares.
    """
    before = np.array([0.0, *itertools.accumulate(costs)])
    cost = before[None, 1:] - before[:-1, None]  # of the layers from `start` to `end`
    ends = np.arange(1, len(before))
    is_stage = [
        (ends > ends[:, None] - 1) & (ends <= np.array(latest)[:, None]) for latest in furthest
    ]
    least, _ = _best(cost, is_stage, np.maximum)
    if not np.isfinite(least):
        return None
    _, chosen = _best(np.where(cost <= least, cost**2, np.inf), is_stage, np.add)
    starts = [0]
    for choice in chosen:
        starts.append(int(choice[starts[-1]]))
    return [range(*pair) for pair in itertools.pairwise(starts)]


def _best(
    prices: NDArray[np.float64], is_stage: Sequence[NDArray[np.bool_]], join: np.ufunc
) -> tuple[float, list[NDArray[np.int64]]]:
    """The least joined price of a cut, infinite if there is none; and for each stage its end, by
    its first layer, the lowest of several."""
    layers = len(prices)
    rest = np.array([*[np.inf] * layers, 0.0])  # by the first layer of the stages that follow
    chosen = []
    for allowed in reversed(is_stage):
        total = np.where(allowed, join(prices, rest[1:]), np.inf)
        chosen.append(total.argmin(axis=1) + 1)
        rest = np.append(total.min(axis=1), np.inf)
    return float(rest[0]), chosen[::-1]


def split_by_hand(sizes: Sequence[int]) -> list[range]:
    limits = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(limits)]
