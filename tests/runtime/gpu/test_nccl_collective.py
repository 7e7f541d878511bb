"""Which communicators groups take, and what they carry out before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from support.standin_device import Hardware
from support.standin_transport import StandIn, StandInCommunicator

from axsparse.runtime.communication import Exchange, Op, wait
from axsparse.runtime.gpu.nccl_collective import SMALLER
from axsparse.runtime.local.local_world import LocalWorld

Call = tuple[str, int]
"""An operation of NCCL's, and the bytes of its buffer."""


class Recorder(StandIn):
    """A transport that notes its communicators' names and calls."""

    def __init__(self, hardware: Hardware, rank: int) -> None:
        super().__init__(hardware, rank, "nccl")
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
            def edge(self, name: str, source: int, target: int) -> None:
                raise AssertionError("groups make communicators only")

            def communicator(self, name: str, ranks: Sequence[int]) -> Recorded:
                own.names.append(name)
                return Recorded(own.device, name, ranks)

        self._connections = Connections()  # type: ignore[assignment]


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    """Each takes hundreds of megabytes of the GPU."""
    world: LocalWorld[None] = LocalWorld(2, seed=3)
    hardware = Hardware(world, seed=3)

    def main(rank: int) -> None:
        transport = Recorder(hardware, rank)
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
        transport.close()

    world.run(main)


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
