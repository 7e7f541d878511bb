"""The contract of `Collective`, in one process; `tests/mpi/test_collective_mpi.py` has MPI."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.collective_contract import CONTRACT

from axsparse.runtime.communication import Op, Transport
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.rank_order import exchanged_bytes, sum_in_rank_order


@pytest.mark.parametrize("order", [None, 0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_local_collective_keeps_the_contract(
    promise: Callable[[Transport], None], ranks: int, order: int | None
) -> None:
    world: LocalWorld[None] = LocalWorld(ranks, seed=order)

    world.run(lambda rank: promise(LocalTransport(world, rank)))


def test_members_that_start_different_operations_are_an_internal_error() -> None:
    world: LocalWorld[None] = LocalWorld(2)

    def main(rank: int) -> None:
        group = LocalTransport(world, rank).world
        group.start(Op.BROADCAST if rank else Op.ALL_REDUCE, torch.zeros(3))

    with pytest.raises(AssertionError, match="members disagree"):
        world.run(main)


def test_a_sum_adds_from_the_first_rank_on() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]

    assert sum_in_rank_order(parts).item() == 0.0
    assert sum_in_rank_order([parts[0], parts[2], parts[1]]).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_added_in_single_precision_and_rounded_once(dtype: torch.dtype) -> None:
    # A quarter of the last place, four times: rounding each time would lose all of it.
    tiny = torch.finfo(dtype).eps / 4
    parts = [torch.tensor([x]).to(dtype) for x in (1.0, tiny, tiny, tiny, tiny)]

    total = sum_in_rank_order(parts)

    assert total.dtype == dtype
    assert total.item() == 1.0 + torch.finfo(dtype).eps


def test_a_sum_leaves_its_parts_alone() -> None:
    parts = [torch.ones(2), torch.ones(2)]

    sum_in_rank_order(parts)

    assert [part.tolist() for part in parts] == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (Op.ALL_REDUCE, [(10 - 2) + 2 * 2, (10 - 3) + 3 * 2, (10 - 5) + 5 * 2]),
        (Op.REDUCE_SCATTER, [10 - 2, 10 - 3, 10 - 5]),
        (Op.ALL_GATHER, [2 * 2, 3 * 2, 5 * 2]),
        (Op.BROADCAST, [10 * 2, 0, 0]),
    ],
)
def test_the_bytes_of_an_exchange_by_hand(op: Op, wanted: list[int]) -> None:
    bounds = [0, 2, 5, 10]

    assert [exchanged_bytes(op, bounds, rank, 4) for rank in range(3)] == [4 * n for n in wanted]
