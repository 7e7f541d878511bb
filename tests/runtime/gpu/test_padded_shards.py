"""Unequal shards travel by one call of NCCL's, whatever the number of members."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.standin_device import Hardware
from support.standin_transport import StandIn, StandInCommunicator

from axsparse.runtime.communication import Op, shard_bounds, wait
from axsparse.runtime.gpu.nccl_collective import NcclCollective
from axsparse.runtime.gpu.padded_shards import is_worth_padding
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.shards import BLOCK, share_bounds

BOUNDS = [0, 30, 70, 100]


class Counted(StandInCommunicator):
    """Notes how often NCCL is called."""

    calls: list[str]

    def _enqueue(self, what, buffer, run, touched):  # type: ignore[no-untyped-def]
        self.calls.append(what)
        return super()._enqueue(what, buffer, run, touched)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("op", [Op.REDUCE_SCATTER, Op.ALL_GATHER])
def test_unequal_shards_are_exchanged_by_one_call(op: Op, seed: int) -> None:
    """The stand-in device finds copies and sums that are not in order."""
    world: LocalWorld[None] = LocalWorld(3, seed=seed)
    hardware = Hardware(world, seed=seed)

    def main(rank: int) -> None:
        transport = StandIn(hardware, rank, "nccl")
        device, backoff = transport.device, transport.backoff
        communicator = Counted(device, "gradients", (0, 1, 2))
        communicator.calls = []
        group = NcclCollective(communicator, device, backoff)
        buffer = device.later(torch.arange(100.0) + 1000 * rank)

        wait(group.start(op, buffer, BOUNDS), backoff)
        found = device.read(buffer)

        own = slice(BOUNDS[rank], BOUNDS[rank + 1])
        if op is Op.REDUCE_SCATTER:
            assert torch.equal(found[own], (3 * torch.arange(100.0) + 3000)[own])
        else:
            member = torch.repeat_interleave(torch.arange(3), torch.tensor(BOUNDS).diff())
            assert torch.equal(found, torch.arange(100.0) + 1000 * member)
        assert communicator.calls == [op.name.lower()]
        group.close()
        transport.close()

    world.run(main)


def test_shares_of_a_layer_are_padded_and_those_of_one_member_are_not() -> None:
    bounds = share_bounds([12 * 512 * BLOCK // 10, 12_288], 64)
    padded = 64 * max(stop - start for start, stop in pairwise(bounds))

    assert is_worth_padding(Op.REDUCE_SCATTER, bounds)
    assert padded < 1.2 * bounds[-1]
    assert not is_worth_padding(Op.ALL_GATHER, [0, 0, 0, 100])
    assert not is_worth_padding(Op.ALL_REDUCE, bounds)
    assert not is_worth_padding(Op.REDUCE_SCATTER, shard_bounds(64, 4))
    assert not is_worth_padding(Op.ALL_GATHER, [0, 0, 0])
