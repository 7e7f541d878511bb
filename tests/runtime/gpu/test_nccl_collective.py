"""Which communicators groups take, what they carry out before training, and unequal shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from support.standin_device import Hardware
from support.standin_transport import (
    StandIn,
    StandInCommunicator,
    StandInConnections,
    StandInPeer,
    Way,
    on_standins,
)

from axsparse.runtime.communication import Exchange, Op, shard_bounds, wait
from axsparse.runtime.gpu.nccl_collective import (
    SMALLER,
    free_beside_nccl,
    is_worth_padding,
)
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.shards import BLOCK, share_bounds

Call = tuple[str, int]
"""An operation of NCCL's, and the bytes of its buffer."""
BOUNDS = [0, 30, 70, 100]
MEMORY, PEER, GROUP = 10_000, 100, 300


class Recorder(StandIn):
    """A transport that notes its communicators' names and calls."""

    def __init__(self, hardware: Hardware, rank: int, way: Way = "nccl") -> None:
        super().__init__(hardware, rank, way)
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.closed = 0
        own = self

        class Recorded(StandInCommunicator):
            def _enqueue(self, what, buffer, run, touched):  # type: ignore[no-untyped-def]
                own.calls.append((what, buffer.nbytes))
                return super()._enqueue(what, buffer, run, touched)

            def close(self) -> None:
                own.closed += 1
                super().close()

        class Connections:
            def peer(self, name: str, source: int, target: int) -> None:
                raise AssertionError("groups make communicators only")

            def communicator(self, name: str, ranks: Sequence[int]) -> Recorded:
                own.names.append(name)
                return Recorded(own.device, name, ranks)

        self._connections = Connections()  # type: ignore[assignment]


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    """Each takes hundreds of megabytes of the GPU."""

    def main(transport: Recorder) -> None:
        for job in range(2):
            branch = transport.branch()
            groups = [branch.collective(name, (0, 1)) for name in ("agreements", "gradients")]
            turned = branch.collective("turned", (1, 0))
            assert transport.names[2 * job :] == [f"agreements {job + 1}", f"turned {job + 1}"]
            for group in (*groups, turned, groups[0]):
                buffer = transport.device.later(torch.ones(3))
                wait(group.start(Op.ALL_REDUCE, buffer), branch.backoff)
                assert transport.device.read(buffer).tolist() == [2.0] * 3
            assert [group.bytes_sent > 0 for group in groups] == [True, True]
            branch.close()
            assert transport.closed == 2 * (job + 1), "each of them once"

    on_standins(2, "nccl", main, seed=3, make=Recorder)


def test_a_group_of_one_has_none() -> None:
    world: LocalWorld[None] = LocalWorld(1)
    transport = Recorder(Hardware(world, 0), 0)

    transport.collective("gradients", (0,), [Exchange(Op.ALL_REDUCE, torch.bfloat16, 9)])

    assert transport.names == []


@pytest.mark.parametrize("bounds", [(0, 50, 100), (0, 30, 100), (0, 0, 100)])
def test_a_group_carries_out_all_that_is_planned_in_every_size_when_it_is_made(
    bounds: tuple[int, ...],
) -> None:
    """NCCL connects each of its algorithms at its first use, and chooses them by size."""
    world: LocalWorld[None] = LocalWorld(2, seed=5)
    hardware = Hardware(world, seed=5)
    planned = [
        Exchange(Op.ALL_REDUCE, torch.bfloat16, 1000),
        Exchange(Op.REDUCE_SCATTER, torch.bfloat16, 100, bounds),
        Exchange(Op.ALL_GATHER, torch.float32, 100, bounds),
    ]

    def main(rank: int) -> None:
        transport = Recorder(hardware, rank)
        group = transport.collective("gradients", (0, 1), planned)

        calls = Counter(transport.calls)
        sizes = [nbytes for what, nbytes in transport.calls if what == "all_reduce"]
        assert sizes == [2 * (1000 // SMALLER**power) for power in range(4)]
        if bounds[1] == 50:
            assert {("reduce_scatter", 200), ("all_gather", 400)} < set(calls)
        elif bounds[1] == 30:  # two shards with the room of the larger one
            assert {("reduce_scatter", 280), ("all_gather", 560)} < set(calls)
        else:
            assert {("reduce to 1", 200), ("broadcast from 1", 400)} < set(calls)
        assert not any(q.pending for q in hardware.queues if q.device is transport.device), (
            "nothing is left under way"
        )
        assert group.bytes_sent == 0, "what nobody asked for does not count"
        transport.close()

    world.run(main)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("op", [Op.REDUCE_SCATTER, Op.ALL_GATHER])
def test_unequal_shards_are_exchanged_by_one_call(op: Op, seed: int) -> None:
    """The stand-in device finds copies and sums that are not in order."""

    def main(transport: Recorder) -> None:
        rank = transport.rank
        device, backoff = transport.device, transport.backoff
        group = transport.collective("gradients", (0, 1, 2))
        buffer = device.later(torch.arange(100.0) + 1000 * rank)

        wait(group.start(op, buffer, BOUNDS), backoff)
        found = device.read(buffer)

        own = slice(BOUNDS[rank], BOUNDS[rank + 1])
        if op is Op.REDUCE_SCATTER:
            assert torch.equal(found[own], (3 * torch.arange(100.0) + 3000)[own])
        else:
            member = torch.repeat_interleave(torch.arange(3), torch.tensor(BOUNDS).diff())
            assert torch.equal(found, torch.arange(100.0) + 1000 * member)
        assert [what for what, _ in transport.calls] == [op.name.lower()]

    on_standins(3, "nccl", main, seed=seed, make=Recorder)


def test_shares_of_a_layer_are_padded_and_those_of_one_member_are_not() -> None:
    bounds = share_bounds([12 * 512 * BLOCK // 10, 12_288], 64)
    padded = 64 * max(stop - start for start, stop in pairwise(bounds))

    assert is_worth_padding(Op.REDUCE_SCATTER, bounds)
    assert padded < 1.2 * bounds[-1]
    assert not is_worth_padding(Op.ALL_GATHER, [0, 0, 0, 100])
    assert not is_worth_padding(Op.ALL_REDUCE, bounds)
    assert not is_worth_padding(Op.REDUCE_SCATTER, shard_bounds(64, 4))
    assert not is_worth_padding(Op.ALL_GATHER, [0, 0, 0])


class Counting(StandInConnections):
    """Connections that each take some memory until they are closed."""

    def __init__(self, transport: StandIn) -> None:
        super().__init__(transport.device)
        self.free = MEMORY

    def peer(self, name: str, source: int, target: int) -> StandInPeer:
        self.free -= PEER
        peer = super().peer(name, source, target)
        self._give_back(peer, PEER)
        return peer

    def communicator(self, name: str, ranks: Sequence[int]) -> StandInCommunicator:
        self.free -= GROUP
        communicator = super().communicator(name, ranks)
        self._give_back(communicator, GROUP)
        return communicator

    def _give_back(self, made: StandInPeer | StandInCommunicator, nbytes: int) -> None:
        """Have closing it free its memory."""
        close = made.close

        def closed() -> None:
            close()
            self.free += nbytes

        made.close = closed  # type: ignore[method-assign]  # as a subclass of each would


def test_an_inner_stage_with_replicas_and_a_tie_has_this_much_left() -> None:
    def main(transport: StandIn) -> int:
        connections = Counting(transport)
        free = free_beside_nccl(
            connections, transport.device, (0, 1), transport.backoff, lambda: connections.free
        )
        assert connections.free == MEMORY, "all are closed again"
        return free

    assert on_standins(2, "nccl", main, seed=1) == [MEMORY - 4 * PEER - 2 * GROUP] * 2
