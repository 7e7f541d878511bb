"""Cuts a list of layers into stages, so that the stage with most work has as little as possible."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

Fits = Callable[[int, range], bool]
"""`fits(stage, layers)` says whether the stage of this number has memory for these layers. A stage
without memory for some layers has none for these and a further layer either."""
Combine = Callable[[float, float], float]
"""Joins the price of the stages so far with the price of one more."""
WIDER = 1.25
"""The factor by which the bound of stage costs is raised until a cut is found within it."""


def partition(costs: Sequence[float], stages: int, fits: Fits | None = None) -> list[range] | None:
    """Cut layers into contiguous, non-empty stages, so that the largest stage cost is smallest.

    `costs[n]` is the work of layer n. Of several such cuts, the one with the smallest sum of
    squared stage costs is taken, so that the other stages are balanced too; of those, the one
    with fewer layers in front. Returns the layers of each stage, or None if no cut fits.
    ValueError if there are fewer layers than stages.

    Dynamic programming over the cuts whose stages are within a bound of cost, which is raised from
    the mean until there is one. Stages that are about equal then begin at few layers and end at
    few: the time is about stages · layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    before = list(itertools.accumulate(costs, initial=0.0))
    cut = _cheapest(before, stages, None)
    if fits is None or cut is None or all(itertools.starmap(fits, enumerate(cut))):
        return cut
    # Some cut may fit that is less balanced.
    return _cheapest(before, stages, fits)


def _cheapest(before: Sequence[float], stages: int, fits: Fits | None) -> list[range] | None:
    """The best cut that fits. `before[n]` is the cost of the first n layers."""
    layers = len(before) - 1
    if fits is not None and not _can_be_split(layers, stages, fits):
        return None
    bound = before[layers] / stages
    while True:
        least = _best(_Within(before, bound, fits), stages, lambda cost: cost, max)
        if least is not None:
            break
        bound *= WIDER
    within = _Within(before, least[0], fits)
    best = _best(within, stages, lambda cost: cost**2, lambda front, own: front + own)
    assert best is not None, "the first search has found such a cut"
    return [range(start, stop) for start, stop in itertools.pairwise((*best[1], layers))]


def _can_be_split(layers: int, stages: int, fits: Fits) -> bool:
    """Whether some cut fits, whatever its stages cost."""
    starts = [0]
    for stage in range(stages - 1):
        last, width = layers - (stages - 1 - stage), 1
        ends: list[int] = []
        for start in starts:
            width = _count_fitting(fits, stage, start, range(start + 1, last + 1), width)
            # Earlier starts have reached all ends from here to the last one found.
            ends += range(max([start, *ends[-1:]]) + 1, start + width + 1)
            if start + width == last:
                break
        starts = ends
    return bool(starts) and fits(stages - 1, range(starts[-1], layers))


def _count_fitting(fits: Fits, stage: int, start: int, ends: range, guess: int = 1) -> int:
    """How many of these ends a stage may have, by bisection from a guess on."""
    least, most, step = 0, len(ends), 1
    at = min(max(guess, 1), most)
    while least < most:
        if fits(stage, range(start, ends[at - 1])):
            least, at = at, min(at + step, most)
        else:
            most, at = at - 1, max(at - step, least + 1)
        step *= 2
        if not least < at <= most:
            at, step = (least + most + 1) // 2, 1
    return least


class _Within:
    """How far stages reach that cost no more than a bound, and fit."""

    def __init__(self, before: Sequence[float], bound: float, fits: Fits | None) -> None:
        self.before = before
        self.layers = len(before) - 1
        self._fits = fits
        self._widths: dict[int, int] = {}

        def cost_from(start: int) -> Callable[[float], float]:
            return lambda until: until - before[start]

        self._reaches = [
            bisect_right(before, bound, lo=start, key=cost_from(start)) - 1
            for start in range(self.layers)
        ]

    def furthest(self, stage: int, start: int) -> int:
        """The largest end of the layers from `start` on; `start` if there is none."""
        if self._fits is None:
            return self._reaches[start]
        ends = range(start + 1, self._reaches[start] + 1)
        # Neighbouring layers are often equal, so that as many fit as from the start before.
        guess = self._widths.get(stage, 1)
        width = self._widths[stage] = _count_fitting(self._fits, stage, start, ends, guess)
        return start + width

    def earliest(self, stages: int) -> list[int]:
        """For each stage the first end behind which the other stages may still reach all layers."""
        ends = [self.layers]
        while len(ends) < stages:
            ends.append(bisect_left(self._reaches, ends[-1]))
        return ends[::-1]


def _best(
    within: _Within, stages: int, price: Callable[[float], float], combine: Combine
) -> tuple[float, list[int]] | None:
    """The least combined price of a cut and the first layer of each of its stages, the lowest of
    several; None if there is no cut."""
    before, layers = within.before, within.layers
    # For each end of the stages so far, the price of the best cut of the layers before it, and
    # the place of its first layers in the order of all such cuts.
    fronts: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    came_from: list[dict[int, int]] = []
    for stage, earliest in enumerate(within.earliest(stages)):
        last = layers - (stages - 1 - stage)
        following: dict[int, tuple[float, int, int]] = {}
        for start, (front, place) in fronts.items():
            until = min(within.furthest(stage, start), last)
            for end in range(max(start + 1, earliest), until + 1):
                candidate = (combine(front, price(before[end] - before[start])), place, start)
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        in_order = sorted(following, key=lambda end: following[end][1:])
        fronts = {end: (following[end][0], place) for place, end in enumerate(in_order)}
        came_from.append({end: start for end, (_, _, start) in following.items()})
    if layers not in fronts:
        return None
    starts = [layers]
    for earlier in reversed(came_from):
        starts.append(earlier[starts[-1]])
    return fronts[layers][0], starts[:0:-1]


def split_by_hand(sizes: Sequence[int]) -> list[range]:
    """The layers of each stage, from the number of layers of each."""
    limits = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(limits)]
