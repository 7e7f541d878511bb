"""The collectives of GPUs over stand-in devices: the contract of `Collective`, and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collective_contract import CONTRACT, a_buffer_lives_until_its_operation_is_done
from support.standin_device import Hardware, MisuseError, StandInDevice
from support.standin_transport import (
    WAYS,
    StandIn,
    StandInCommunicator,
    StandInConnections,
    StandInPeer,
    Way,
    on_standins,
)
from torch import Tensor

from axsparse.runtime.communication import Op, Transport, Work, shard_bounds, wait, wait_for
from axsparse.runtime.errors import TrainingError
from axsparse.runtime.gpu.collectives import (
    NcclCollective,
    NcclWork,
    StagedCollective,
    TwoWayCollective,
)
from axsparse.runtime.gpu.gpu_transport import PushingBackoff
from axsparse.runtime.local.local_world import LocalWorld, TurnBackoff
from axsparse.runtime.rank_order import sum_in_rank_order

BY_HOSTS = (a_buffer_lives_until_its_operation_is_done,)
"""Ranks meet here while others are in the middle of an operation of theirs."""
MEMORY, PEER, GROUP = 10_000, 100, 300
Made = TypeVar("Made", StandInPeer, StandInCommunicator)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_collective_of_gpus_keeps_the_contract(
    promise: Callable[[Transport], None], way: Way, ranks: int
) -> None:
    def main(transport: StandIn) -> None:
        hosts = transport.world
        if promise not in BY_HOSTS:
            transport.world = transport.collective("all", range(ranks))
        promise(transport)
        transport.world = hosts

    on_standins(ranks, way, main, seed=ranks)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    way=st.sampled_from(WAYS),
    ranks=st.integers(2, 3),
    seed=st.integers(0, 1 << 16),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_gradients_that_are_computed_late_are_summed_in_the_order_of_their_start(
    way: Way, ranks: int, seed: int, sizes: list[int]
) -> None:
    """Any race between compute, copies, hosts and NCCL is an error of the stand-in."""

    def part(rank: int, number: int) -> Tensor:
        return torch.arange(sizes[number], dtype=torch.float32) * (rank + 1) + number

    def main(transport: StandIn) -> None:
        rank = transport.rank
        group = transport.collective("gradients", range(ranks))
        device = transport.device
        under_way = []
        for number, size in enumerate(sizes):
            buffer = device.later(part(rank, number))
            op = Op.REDUCE_SCATTER if size % 3 == 0 else Op.ALL_REDUCE
            under_way.append((group.start(op, buffer), buffer, number))
            transport.backoff.pause()
        while under_way:
            work, buffer, number = under_way.pop()
            while not work.poll():
                transport.backoff.pause()
            total = sum_in_rank_order([part(other, number) for other in range(ranks)])
            bounds = shard_bounds(sizes[number], ranks)
            own = slice(bounds[rank], bounds[rank + 1]) if sizes[number] % 3 == 0 else slice(None)
            assert torch.equal(device.read(buffer)[own], total[own])

    on_standins(ranks, way, main, seed=seed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bounds", [[0, 3, 6], [0, 2, 6]], ids=["equal", "unequal"])
@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.BROADCAST])
def test_integers_of_16_bits_are_exchanged_although_nccl_has_no_such_type(
    op: Op, bounds: list[int], way: Way
) -> None:
    values = torch.arange(6, dtype=torch.int16) - 3

    def main(transport: StandIn) -> Tensor:
        rank = transport.rank
        group = transport.collective("state", range(2))
        own = torch.zeros_like(values)
        whole = slice(None) if op is Op.BROADCAST and rank == 0 else slice(0)
        part = slice(*bounds[rank : rank + 2]) if op is Op.ALL_GATHER else whole
        own[part] = values[part]
        buffer = transport.device.later(own)
        wait(group.start(op, buffer, bounds), transport.backoff)
        return transport.device.read(buffer)

    assert all(torch.equal(found, values) for found in on_standins(2, way, main, seed=6))


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_lives_until_its_sum_is_there_and_closing_waits_for_it(way: Way) -> None:
    def main(transport: StandIn) -> float:
        group = transport.collective("gradients", range(2))
        for _ in range(3):
            work = group.start(Op.ALL_REDUCE, transport.device.later(torch.ones(5)))
            wait(work, transport.backoff)
        buffer = transport.device.later(torch.ones(5))
        group.start(Op.ALL_REDUCE, buffer)
        transport.close()
        return float(buffer[4])

    assert on_standins(2, way, main, seed=4) == [2.0, 2.0]


def test_compute_waits_for_an_operation_over_nccl_and_the_host_does_not() -> None:
    def main(transport: StandIn) -> Tensor:
        group = transport.collective("pair", range(2))
        device, hardware = transport.device, transport.device.hardware
        buffer = device.later(torch.tensor([1.0, 2.0]))
        hardware.frozen = True
        work = group.start(Op.ALL_REDUCE, buffer)
        with pytest.raises(MisuseError, match="compute reads what all_reduce of NCCL writes"):
            device.read(buffer)
        assert isinstance(work, NcclWork)
        work.before_compute()
        hardware.frozen = False
        wait_for(device.compute.record(), transport.backoff)
        return device.read(buffer)

    assert [found.tolist() for found in on_standins(2, "nccl", main, seed=5)] == [[2.0, 4.0]] * 2


class Failing:
    """An operation that takes a while and has failed then."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > 2:
            raise TrainingError("an exchange between GPUs failed")
        return False


def test_what_failed_while_compute_waited_is_told_at_the_next_pause_or_start() -> None:
    world: LocalWorld[None] = LocalWorld(1)
    backoff = PushingBackoff(TurnBackoff(world, 0))
    compute = SimpleNamespace(record=lambda: None, wait=lambda event: None)
    communicator = SimpleNamespace(
        rank=0, size=2, stream=compute, all_reduce=lambda buffer: Failing()
    )
    for look in ("pause", "start"):
        group = NcclCollective(
            cast("Any", communicator), cast("Any", SimpleNamespace(compute=compute)), backoff
        )
        backoff.pushes = [group.advance]
        group.start(Op.ALL_REDUCE, torch.ones(2)).before_compute()
        again = backoff.pause if look == "pause" else group.advance
        again()
        again()
        with pytest.raises(TrainingError, match="an exchange between GPUs failed"):
            backoff.pause() if look == "pause" else group.start(Op.ALL_REDUCE, torch.ones(2))


class Noted:
    """A collective that keeps what it was to do, and does nothing."""

    rank, size, bytes_sent = 0, 1, 7

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        self.buffers.append(buffer)
        return self

    def poll(self) -> bool:
        return True


@pytest.mark.parametrize("seed", range(10))
def test_the_hosts_get_operations_in_the_order_of_their_start(seed: int) -> None:
    world: LocalWorld[None] = LocalWorld(1)
    hosts, device = Noted(), StandInDevice(Hardware(world, seed), 0)
    group = StagedCollective(hosts, device, TurnBackoff(world, 0))
    works = [group.start(Op.ALL_REDUCE, device.later(torch.ones(size))) for size in range(1, 9)]

    while not all(work.poll() for work in reversed(works)):
        pass

    assert [buffer.numel() for buffer in hosts.buffers] == list(range(1, 9))


def test_buffers_of_the_hosts_stay_with_the_hosts() -> None:
    """Small agreements are not sent through a GPU."""
    hosts, devices = Noted(), Noted()
    group = TwoWayCollective(hosts, devices, "meta")
    here, there = torch.zeros(1), torch.zeros(1, device="meta")

    group.start(Op.ALL_REDUCE, here)
    group.start(Op.ALL_REDUCE, there)

    assert hosts.buffers[0] is here and devices.buffers[0] is there
    assert (len(hosts.buffers), len(devices.buffers)) == (1, 1)
    assert (group.rank, group.size, group.bytes_sent) == (0, 1, 14)


class Counting(StandInConnections):
    """Connections that each take some memory until they are closed, and note their names."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__(device)
        self.free = MEMORY
        self.groups: list[str] = []

    def peer(self, name: str, source: int, target: int) -> StandInPeer:
        return self._counted(super().peer(name, source, target), PEER)

    def communicator(self, name: str, ranks: Sequence[int]) -> StandInCommunicator:
        self.groups.append(name)
        return self._counted(super().communicator(name, ranks), GROUP)

    def _counted(self, made: Made, nbytes: int) -> Made:
        """Have closing it free its memory."""
        self.free -= nbytes
        close = made.close

        def closed() -> None:
            close()
            self.free += nbytes

        made.close = closed  # type: ignore[method-assign]  # as a subclass of each would
        return made


class Counted(StandIn):
    """A transport that groups and links take the memory of."""

    def __init__(self, hardware: Hardware, rank: int, way: Way = "nccl") -> None:
        super().__init__(hardware, rank, way)
        self.connections = Counting(self.device)
        self._connections = self.connections


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    """Each takes hundreds of megabytes of the GPU."""

    def main(transport: Counted) -> None:
        made = transport.connections
        for job in range(2):
            branch = transport.branch()
            groups = [branch.collective(name, (0, 1)) for name in ("agreements", "gradients")]
            turned = branch.collective("turned", (1, 0))
            assert made.groups[2 * job :] == [f"agreements {job + 1}", f"turned {job + 1}"]
            for group in (*groups, turned, groups[0]):
                buffer = transport.device.later(torch.ones(3))
                wait(group.start(Op.ALL_REDUCE, buffer), branch.backoff)
                assert transport.device.read(buffer).tolist() == [2.0] * 3
            assert [group.bytes_sent > 0 for group in groups] == [True, True]
            branch.close()
            assert made.free == MEMORY, "each of them was closed once"

    on_standins(2, "nccl", main, seed=3, make=Counted)


def test_a_group_of_one_has_none() -> None:
    transport = Counted(Hardware(LocalWorld(1), 0), 0)

    assert not isinstance(transport.collective("alone", [0]), TwoWayCollective)
    assert transport.connections.groups == []
