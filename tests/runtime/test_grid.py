"""Ranks, stages and replicas."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.runtime.grid import Grid


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.builds(Grid, st.integers(1, 6), st.integers(1, 6)))
def test_places_fill_the_grid_and_columns_hold_one_stage_of_every_replica(grid: Grid) -> None:
    places = [grid.coords(rank) for rank in range(grid.size)]

    assert [grid.rank(coords.stage, coords.replica) for coords in places] == list(range(grid.size))
    assert len({(coords.stage, coords.replica) for coords in places}) == grid.g_inter * grid.g_data
    for stage in range(grid.g_inter):
        column = [places[rank] for rank in grid.dp_group(stage)]
        assert {coords.stage for coords in column} == {stage}
        assert [coords.replica for coords in column] == list(range(grid.g_data))


def test_neighbouring_stages_have_neighbouring_ranks() -> None:
    assert [str(Grid(2, 2).coords(rank)) for rank in range(4)] == [
        "rank 0 (stage 0, replica 0)",
        "rank 1 (stage 1, replica 0)",
        "rank 2 (stage 0, replica 1)",
        "rank 3 (stage 1, replica 1)",
    ]
