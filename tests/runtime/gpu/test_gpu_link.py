"""The links of GPUs over stand-in devices: the contract of `Link`, and any delays and sizes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.link_contract import CONTRACT
from support.standin_device import Hardware
from support.standin_transport import WAYS, StandIn, Way, on_standins
from torch import Tensor

from axsparse.runtime.communication import Direction, Link, Message, Op, Transport, wait
from axsparse.runtime.gpu.device_protocol import PeerConnection
from axsparse.runtime.gpu.gpu_link import Receiver, Sender
from axsparse.runtime.gpu.transfers import (
    StagedReceiver,
    StagedSender,
)
from axsparse.runtime.grid import Grid
from axsparse.runtime.host_channel import HostChannel
from axsparse.runtime.local.local_world import LocalWorld

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


class SmallPieces(StandIn):
    """Two slots of 40 bytes."""

    def _sender(self, channel: HostChannel, peer: PeerConnection | None) -> Sender:
        if peer is not None:
            return super()._sender(channel, peer)
        return StagedSender(channel, self.device, slots=2, slot_bytes=40)

    def _receiver(self, channel: HostChannel, peer: PeerConnection | None) -> Receiver:
        if peer is not None:
            return super()._receiver(channel, peer)
        return StagedReceiver(channel, self.device, slots=2, slot_bytes=40)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_link_of_gpus_keeps_the_contract(
    promise: Callable[[Transport], None], way: Way, ranks: int
) -> None:
    def main(transport: StandIn) -> None:
        promise(transport)

    on_standins(ranks, way, main, seed=ranks)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    way=st.sampled_from(WAYS),
    ranks=st.integers(2, 3),
    seed=st.integers(0, 1 << 16),
    sizes=st.lists(st.lists(st.integers(0, 70), max_size=3), min_size=1, max_size=8),
)
def test_every_message_arrives_once_in_order_and_whole(
    way: Way, ranks: int, seed: int, sizes: list[list[int]]
) -> None:
    """What a stage sends is computed late, what it receives is read by compute at once, and any
    race between them is an error of the stand-in."""

    def main(transport: SmallPieces) -> None:
        rank = transport.rank
        place = Grid(ranks, 1).place(rank)
        link = transport.link(place)
        chance = random.Random(seed + rank)  # noqa: S311 - another order on every rank
        left = {
            direction: list(range(len(sizes)))
            for direction, none in zip(Direction, (place.is_last, place.is_first), strict=True)
            if not none
        }
        expected = {
            direction: rank + step
            for direction, step, none in zip(
                Direction, (-1, 1), (place.is_first, place.is_last), strict=True
            )
            if not none
        }
        arrived: dict[Direction, list[int]] = {direction: [] for direction in expected}
        while any(left.values()) or any(len(got) < len(sizes) for got in arrived.values()):
            for direction, numbers in left.items():
                if numbers and chance.random() < 0.5:
                    number = numbers.pop(0)
                    wanted = _contents(rank, number, sizes[number])
                    sent = tuple(map(transport.device.later, wanted))
                    link.send(Message(direction, number, sent))
            for message in link.arrivals():
                direction, number = message.direction, message.microbatch
                arrived[direction].append(number)
                contents = _contents(expected[direction], number, sizes[number])
                for tensor, wanted_one in zip(message.tensors, contents, strict=True):
                    assert tensor is not None
                    assert torch.equal(transport.device.read(tensor), wanted_one)
            transport.backoff.pause()
        assert all(got == list(range(len(sizes))) for got in arrived.values())

    on_standins(ranks, way, main, seed=seed, make=SmallPieces)


@pytest.mark.parametrize("way", WAYS)
def test_messages_that_nobody_takes_are_dropped_when_both_close(way: Way) -> None:
    def main(transport: SmallPieces) -> int:
        rank = transport.rank
        place = Grid(3, 1).place(rank)
        link = transport.link(place)
        if rank == 0:
            for number in range(5):
                tensor = transport.device.later(torch.arange(60.0))
                link.send(Message(Direction.FORWARD, number, (tensor,)))
        # The stand-in's channels and connections refuse to be closed with something on the way.
        transport.close()
        return link.unsent

    assert on_standins(3, way, main, seed=1, make=SmallPieces) == [0, 0, 0]


@pytest.mark.parametrize("way", WAYS)
def test_a_sent_tensor_lives_until_it_is_through_and_no_longer(way: Way) -> None:
    def main(transport: StandIn) -> None:
        rank = transport.rank
        link = transport.link(Grid(2, 1).place(rank))
        if rank == 0:
            tensor = transport.device.later(torch.ones(9))
            alive = weakref.ref(tensor.untyped_storage())
            link.send(Message(Direction.FORWARD, 0, (tensor,)))
            del tensor
            assert alive() is not None
            while link.unsent:
                assert alive() is not None
                assert link.arrivals() == []
                transport.backoff.pause()
            assert alive() is None
        while rank == 1 and not link.arrivals():
            transport.backoff.pause()

    on_standins(2, way, main, seed=3)


def test_a_header_waits_for_the_tensors_and_for_the_sends_before_it() -> None:
    """A receive of NCCL, which the header calls for, must never spin through a forward."""
    world: LocalWorld[None] = LocalWorld(2)
    hardware = Hardware(world, seed=0)
    hardware.frozen = True
    transport = StandIn(hardware, 0, "nccl")
    peer = StandIn(hardware, 1, "nccl")
    links = [t.link(Grid(2, 1).place(rank)) for rank, t in enumerate((transport, peer))]

    for number in range(2):
        tensor = transport.device.later(torch.full((3,), float(number)))
        links[0].send(Message(Direction.FORWARD, number, (tensor,)))

    def settle() -> list[int]:
        """What has arrived once nothing but compute's work is left to be done."""
        got = []
        for _ in range(5):
            hardware.finish(but=transport.device.compute.queue)
            got += [message.microbatch for message in links[1].arrivals()]
            assert links[0].arrivals() == []
        return got

    assert settle() == []
    asked = [queue for queue in hardware.queues if queue.device.rank == 1 and queue.pending]
    assert not asked, "a receive was enqueued before its tensor was ready"
    hardware.finish()
    assert settle() == [0, 1]


@pytest.mark.parametrize("messages", [1, 2])
def test_nothing_waits_on_the_device_for_what_only_the_host_can_do(messages: int) -> None:
    """A host may stand in a call that waits for its whole device: the allocator frees memory, a
    kernel is loaded. A send that spins without its header would keep it there for ever."""
    world: LocalWorld[None] = LocalWorld(2)
    hardware = Hardware(world, seed=0)
    hardware.frozen = True
    transport = StandIn(hardware, 0, "nccl")
    peer = StandIn(hardware, 1, "nccl")
    links = [t.link(Grid(2, 1).place(rank)) for rank, t in enumerate((transport, peer))]
    for number in range(messages):
        tensor = transport.device.later(torch.full((3,), float(number)))
        links[0].send(Message(Direction.FORWARD, number, (tensor,)))
        if number < messages - 1:  # the last one is all that this host never looks after
            for _ in range(2):  # the tensor is ready, and the header has left
                hardware.finish()
                assert links[0].arrivals() == []

    got: list[int] = []
    for _ in range(5):
        hardware.finish()
        got += [message.microbatch for message in links[1].arrivals()]

    left = [q for q in hardware.queues if q.device is transport.device and q.pending]
    assert not left
    assert got == list(range(messages - 1))


def test_contents_wait_on_the_device_only_once_their_header_has_left() -> None:
    """An MPI library may keep a header until its host calls it again. A send that spins by then
    would keep a host for ever that stands in a call that waits for its whole device."""
    world: LocalWorld[None] = LocalWorld(2)
    hardware = Hardware(world, seed=0)
    hardware.frozen = True
    transport = StandIn(hardware, 0, "nccl")
    link = transport.link(Grid(2, 1).place(0))
    peer = StandIn(hardware, 1, "nccl").link(Grid(2, 1).place(1))
    link.send(Message(Direction.FORWARD, 0, (transport.device.later(torch.ones(3)),)))

    def pending() -> list[str]:
        link.push()
        return [q.name for q in hardware.queues if q.device is transport.device and q.pending]

    hardware.finish()
    for _ in range(2):
        [name] = pending()
        assert name.startswith("headers"), "the header is under way, and nothing is on the device"
    hardware.finish()
    [name] = pending()
    assert not name.startswith("headers"), "the send follows at the next look"
    assert [message.microbatch for _ in range(3) for message in looked(hardware, peer)] == [0]


def looked(hardware: Hardware, link: Link) -> list[Message]:
    """What has arrived at a link once devices have run all that they can."""
    found = link.arrivals()
    hardware.finish()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_for_something_else_still_sends_its_messages(way: Way) -> None:
    world: LocalWorld[None] = LocalWorld(2, seed=2)
    hardware = Hardware(world, seed=2)

    def main(rank: int) -> None:
        transport = SmallPieces(hardware, rank, way)
        link = transport.link(Grid(2, 1).place(rank))
        if rank == 0:
            tensor = transport.device.later(torch.ones(99))
            link.send(Message(Direction.FORWARD, 0, (tensor,)))
        while rank == 1 and not link.arrivals():
            transport.backoff.pause()
        here = torch.zeros(1, dtype=torch.float64)
        wait(transport.world.start(Op.ALL_REDUCE, here), transport.backoff)
        transport.close()

    world.run(main)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_branch_has_made_goes_with_it_and_the_next_one_has_names_of_its_own(
    way: Way,
) -> None:
    def main(transport: StandIn) -> list[int]:
        rank = transport.rank
        pushes = transport.backoff.pushes  # type: ignore[attr-defined]  # what waiting moves on
        seen: list[int] = []
        for _ in range(2):
            branch = transport.branch()
            link = branch.link(Grid(2, 1).place(rank))
            group = branch.collective("gradients", range(2))
            if rank == 0:
                tensor = transport.device.later(torch.ones(9))
                link.send(Message(Direction.FORWARD, 0, (tensor,)))
            while rank == 1 and not link.arrivals():
                transport.backoff.pause()
            buffer = transport.device.later(torch.ones(4))
            wait(group.start(Op.ALL_REDUCE, buffer), transport.backoff)
            assert transport.device.read(buffer).tolist() == [2.0] * 4
            seen.append(len(pushes))
            branch.close()
            seen.append(len(pushes))
        return seen

    moved = 1 if way == "nccl" else 2  # a staged collective waits for the host, too
    assert on_standins(2, way, main, seed=2) == [[moved, 0] * 2] * 2


@pytest.mark.parametrize(("rank", "direction"), [(0, Direction.BACKWARD), (1, Direction.FORWARD)])
def test_a_gpu_message_to_no_neighbour_is_an_internal_error(
    rank: int, direction: Direction
) -> None:
    world: LocalWorld[None] = LocalWorld(2)
    link = StandIn(Hardware(world, 0), rank, "nccl").link(Grid(2, 1).place(rank))

    with pytest.raises(AssertionError, match="no such neighbour"):
        link.send(Message(direction, 0, (torch.zeros(1),)))


def test_links_of_the_same_ranks_are_apart() -> None:
    def main(transport: StandIn) -> None:
        rank = transport.rank
        links = [transport.link(Grid(2, 1).place(rank)) for _ in range(2)]
        if rank == 0:
            for number in (1, 0):
                links[number].send(Message(Direction.FORWARD, number, (torch.tensor([number]),)))
        for number in range(2 * rank):
            while not (arrived := links[number].arrivals()):
                transport.backoff.pause()
            assert [message.microbatch for message in arrived] == [number]
            assert [message.tensors[0] for message in arrived] == [torch.tensor([number])]

    on_standins(2, "nccl", main, seed=5)


def _contents(rank: int, number: int, sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return [
        torch.randint(0, 100, (size,), generator=generator).to(DTYPES[(number + at) % len(DTYPES)])
        for at, size in enumerate(sizes)
    ]
