"""How a layer's kept entries are dealt out over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.samo.shards import BLOCK, share_bounds

sizes = st.integers(0, 5 * BLOCK) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1])


def block_ends(kept: Sequence[int]) -> set[int]:
    ends = {0}
    for begin, end in pairwise(accumulate(kept, initial=0)):
        ends |= {*range(begin, end, BLOCK), end}
    return ends


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(sizes, max_size=6), st.integers(1, 9))
def test_shares_cover_a_layer_and_are_equal_to_half_a_block(kept: list[int], replicas: int) -> None:
    bounds = share_bounds(kept, replicas)

    assert len(bounds) == replicas + 1
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, sum(kept))
    assert set(bounds) <= block_ends(kept)
    for replica, bound in enumerate(bounds):
        assert abs(bound - sum(kept) * replica / replicas) <= BLOCK / 2
