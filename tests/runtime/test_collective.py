"""The contract of `Collective`, in one process; `tests/mpi/test_collective_mpi.py` has MPI."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.collective_contract import CONTRACT

from axsparse.runtime.communication import Op, Transport
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld


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
