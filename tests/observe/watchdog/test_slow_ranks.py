"""A rank that computes for longer than its peers is warned of, once."""

from __future__ import annotations

import pytest

from axsparse.observe.watchdog.slow_ranks import SlowRanks
from axsparse.runtime.grid import Grid

WINDOW = 4


def slow_ranks(grid: Grid, *, work: list[float] | None = None) -> SlowRanks:
    hosts = [f"node{rank}" for rank in range(grid.size)]
    return SlowRanks(grid, work or [1.0] * grid.g_inter, hosts, ratio=1.5, steps=WINDOW)


def warnings(slow: SlowRanks, *seconds: list[float]) -> list[tuple[int, str]]:
    """The warnings after a first step and then one window for each entry of `seconds`."""
    said = [(1, slow.add(1, [100.0, *seconds[0][1:]]))]
    steps = [each for each in seconds for _ in range(WINDOW)]
    said += [(step, slow.add(step, each)) for step, each in enumerate(steps, 2)]
    return [(step, text) for step, text in said if text is not None]


LAME, FAST = [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("grid", "work", "seconds", "expected"),
    [
        # Replicas are compared with the median of the others of their stage, here 4 s.
        (Grid(2, 3), None, [[1.0, 4.0, 1.0, 8.0, 1.0, 4.0]], [(5, 3)]),
        # A slow rank that has little to do holds nobody up.
        (Grid(2, 3), None, [[1.0, 8.0, 2.0, 8.0, 1.0, 7.0]], []),
        # Without replicas, stages are compared by their share of the work.
        (Grid(3, 1), [1.0, 2.0, 4.0], [[1.0, 3.5, 4.0]], [(5, 1)]),
        (Grid(3, 1), [1.0, 2.0, 4.0], [[1.0, 2.1, 4.2]], []),
        # A rank alone, and stages without work, are compared with nobody.
        (Grid(1, 1), None, [[1.0], [9.0]], []),
        (Grid(2, 1), [0.0, 1.0], [[9.0, 1.0], [1.0, 9.0]], []),
        # What is lost in the noise of small steps is not told.
        (Grid(1, 2), None, [[0.01, 0.05]], []),
        (Grid(1, 2), None, [[0.01, 0.07]], [(5, 1)]),
        # A rank is named again only after it was fast; another rank that gets slow is named, too.
        (Grid(1, 3), None, [LAME, LAME, LAME, FAST, LAME], [(5, 2), (21, 2)]),
        (Grid(1, 4), None, [[1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 2.5, 2.0]], [(5, 3), (9, 2)]),
    ],
)
def test_slow_ranks_are_named(
    grid: Grid,
    work: list[float] | None,
    seconds: list[list[float]],
    expected: list[tuple[int, int]],
) -> None:
    found = warnings(slow_ranks(grid, work=work), *seconds)

    assert [(step, int(text.split()[2])) for step, text in found] == expected


def test_a_warning_says_against_whom_and_how_many_more_are_slow() -> None:
    [(_, replicas)] = warnings(slow_ranks(Grid(1, 4)), [1.0, 1.2, 3.0, 5.0])
    [(_, stages)] = warnings(slow_ranks(Grid(3, 1), work=[1.0, 2.0, 4.0]), [1.0, 3.5, 4.0])

    assert replicas == (
        "warning: rank 3 (stage 0, replica 3) on host node3: computes 4.2 times as long as the "
        "other replicas of its stage (5 s a step against 1.2 s, steps 2 to 5), and 1 more is slow; "
        "see what else runs there"
    )
    assert "computes 1.8 times as long as its work takes elsewhere (3.5 s a step ag" in stages


def test_the_first_step_and_a_short_pause_are_not_counted() -> None:
    slow = slow_ranks(Grid(1, 2))

    said = [slow.add(step, [2.0 if step == 3 else 1.0, 1.0]) for step in range(2, 10)]

    assert said == [None] * 8
