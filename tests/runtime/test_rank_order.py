"""Sums in rank order, and the bytes that an exchange hands over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.runtime.communication import Op, shard_bounds
from axsparse.runtime.rank_order import (
    PIECE,
    exchanged_bytes,
    store_sum_in_rank_order,
    sum_in_rank_order,
)

examples = settings(max_examples=60, deadline=None, derandomize=True)


def test_parts_are_added_first_to_last() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]

    assert sum_in_rank_order(parts).item() == ((1e8 + 0.0) - 1e8) + 1.0
    assert sum_in_rank_order(parts[::-1]).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_added_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    one, little = torch.ones(1, dtype=dtype), torch.tensor([2.0**-12], dtype=dtype)

    total = sum_in_rank_order([one] + [little] * 64)

    assert total.dtype == dtype
    assert total.item() == 1 + 64 * 2.0**-12


@pytest.mark.parametrize("count", [1, 2])
def test_the_parts_themselves_are_left_alone(count: int) -> None:
    parts = [torch.ones(3) for _ in range(count)]

    total = sum_in_rank_order(parts)
    total.zero_()

    assert all(part.tolist() == [1.0] * 3 for part in parts)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, PIECE, 2 * PIECE + 3])
def test_a_stored_sum_may_take_the_place_of_any_of_its_parts(
    numel: int, dtype: torch.dtype, count: int
) -> None:
    generator = torch.Generator().manual_seed(numel)
    parts = [(9 * torch.randn(numel, generator=generator)).to(dtype) for _ in range(count)]
    wanted = sum_in_rank_order(parts)

    for place in range(count):
        own = [part.clone() for part in parts]
        store_sum_in_rank_order(own, own[place])
        assert torch.equal(own[place], wanted)
        assert all(torch.equal(own[p], parts[p]) for p in range(count) if p != place)


@examples
@given(st.integers(0, 1000), st.integers(1, 7), st.sampled_from([2, 4, 8]))
def test_all_ranks_together_hand_over_the_rings_volume(
    numel: int, size: int, itemsize: int
) -> None:
    bounds = shard_bounds(numel, size)

    def total(op: Op) -> int:
        return sum(exchanged_bytes(op, bounds, rank, itemsize) for rank in range(size))

    assert total(Op.ALL_REDUCE) == 2 * (size - 1) * numel * itemsize
    assert total(Op.REDUCE_SCATTER) == (size - 1) * numel * itemsize
    assert total(Op.ALL_GATHER) == (size - 1) * numel * itemsize
    assert total(Op.BROADCAST) == (size - 1) * numel * itemsize


def test_each_rank_sends_the_shards_of_others_and_then_its_own_to_all() -> None:
    bounds = [0, 1, 4, 10]

    assert [exchanged_bytes(Op.REDUCE_SCATTER, bounds, rank, 4) for rank in range(3)] == [
        36,
        28,
        16,
    ]
    assert [exchanged_bytes(Op.ALL_GATHER, bounds, rank, 4) for rank in range(3)] == [8, 24, 48]
    assert [exchanged_bytes(Op.ALL_REDUCE, bounds, rank, 4) for rank in range(3)] == [44, 52, 64]
    assert [exchanged_bytes(Op.BROADCAST, bounds, rank, 4) for rank in range(3)] == [80, 0, 0]
