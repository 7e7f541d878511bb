"""Layers to stages: the dearest stage is as cheap as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.pipeline.partition import partition, split_by_hand

# Whole numbers, so that costs compare exactly.
COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def every_cut(layers: int, stages: int) -> Iterator[list[range]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        limits = (0, *cuts, layers)
        yield [range(start, stop) for start, stop in itertools.pairwise(limits)]


def expense(costs: Sequence[float], stages: list[range]) -> tuple[float, float, list[int]]:
    """Dearest stage, then the sum of squares, then where the stages start."""
    sums = [sum(costs[layer] for layer in stage) for stage in stages]
    return max(sums), sum(cost**2 for cost in sums), [stage.start for stage in stages]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(COSTS, st.data())
def test_no_other_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    chosen = partition(costs, stages)

    best = min(every_cut(len(costs), stages), key=lambda cut: expense(costs, cut))
    assert chosen == best


@settings(deadline=None, derandomize=True, max_examples=200)
@given(COSTS, st.lists(st.integers(0, 40), min_size=9, max_size=9), st.data())
def test_among_the_cuts_that_fit_none_is_better(
    costs: list[int], room: list[int], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))

    def fits(stage: int, layers: range) -> bool:
        return sum(sizes[layer] for layer in layers) <= room[stage]

    chosen = partition(costs, stages, fits)

    fitting = [
        cut
        for cut in every_cut(len(costs), stages)
        if all(fits(stage, layers) for stage, layers in enumerate(cut))
    ]
    best = min(fitting, key=lambda cut: expense(costs, cut), default=None)
    assert chosen == best


def test_a_split_by_hand_has_the_given_sizes_in_order() -> None:
    assert split_by_hand([2, 1, 3]) == [range(2), range(2, 3), range(3, 6)]
