"""The links of GPUs over stand-in devices: the contract of `Link`, and any delays and sizes."""

from __future__ import annotations

import random
import weakref
from collections import Counter
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
from axsparse.runtime.gpu.gpu_link import Nccl, Staged
from axsparse.runtime.grid import Grid
from axsparse.runtime.host_channel import HostChannel
from axsparse.runtime.local.local_world import LocalWorld

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


class SmallPieces(StandIn):
    """No call between the hosts carries more than 40 bytes."""

    def _way(self, channel: HostChannel, connection: PeerConnection | None) -> Nccl | Staged:
        if connection is not None:
            return super()._way(channel, connection)
        return Staged(channel, self.device, max_call_bytes=40)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_link_of_gpus_keeps_the_contract(
    promise: Callable[[Transport], None], way: Way, ranks: int
) -> None:
    on_standins(ranks, way, promise, seed=ranks)


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
    """A stage's messages are computed late, received ones are read by compute at once, and any race
    between them is an error of the stand-in."""

    def main(transport: SmallPieces) -> None:
        rank = transport.rank
        coords = Grid(ranks, 1).coords(rank)
        link = transport.link(coords)
        chance = random.Random(seed + rank)  # noqa: S311 - another order on every rank
        ends = {Direction.FORWARD: coords.is_last, Direction.BACKWARD: coords.is_first}
        left = {to: list(range(len(sizes))) for to, is_end in ends.items() if not is_end}
        sources = {Direction.FORWARD: rank - 1, Direction.BACKWARD: rank + 1}
        arrived: dict[Direction, list[int]] = {
            to: [] for to, source in sources.items() if 0 <= source < ranks
        }
        while any(left.values()) or any(len(got) < len(sizes) for got in arrived.values()):
            for direction, numbers in left.items():
                if numbers and chance.random() < 0.5:
                    number = numbers.pop(0)
                    expected = _contents(rank, number, sizes[number])
                    sent = tuple(map(transport.device.later, expected))
                    link.send(Message(direction, number, sent))
            for message in link.arrivals():
                direction, number = message.direction, message.microbatch
                arrived[direction].append(number)
                contents = _contents(sources[direction], number, sizes[number])
                for tensor, expected_one in zip(message.tensors, contents, strict=True):
                    assert tensor is not None
                    assert torch.equal(transport.device.read(tensor), expected_one)
            transport.backoff.pause()
        assert all(got == list(range(len(sizes))) for got in arrived.values())

    on_standins(ranks, way, main, seed=seed, make=SmallPieces)


def _contents(rank: int, number: int, sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return [
        torch.randint(0, 100, (size,), generator=generator).to(DTYPES[(number + at) % len(DTYPES)])
        for at, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_messages_that_nobody_takes_are_dropped_when_both_close(way: Way) -> None:
    def main(transport: SmallPieces) -> int:
        link = transport.link(Grid(3, 1).coords(transport.rank))
        if transport.rank == 0:
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
        link = transport.link(Grid(2, 1).coords(transport.rank))
        if transport.rank == 0:
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
        while transport.rank == 1 and not link.arrivals():
            transport.backoff.pause()

    on_standins(2, way, main, seed=3)


class Frozen:
    """Two neighbours whose devices do nothing by themselves; the first sends to the second."""

    def __init__(self) -> None:
        world: LocalWorld[None] = LocalWorld(2)
        self.hardware = Hardware(world, seed=0)
        self.hardware.frozen = True
        transports = [StandIn(self.hardware, rank, "nccl") for rank in range(2)]
        self.device = transports[0].device
        self.links: list[Link] = [
            one.link(Grid(2, 1).coords(rank)) for rank, one in enumerate(transports)
        ]

    def send(self, number: int) -> None:
        """Send a message that compute has yet to make."""
        tensor = self.device.later(torch.full((3,), float(number)))
        self.links[0].send(Message(Direction.FORWARD, number, (tensor,)))

    def pending(self, rank: int) -> list[str]:
        """The queues of a rank in which something is left."""
        return [q.name for q in self.hardware.queues if q.device.rank == rank and q.pending]

    def settle(self, *, computes: bool = True, sender_looks: bool = True) -> list[int]:
        """The messages that arrived once devices have run all that they can, compute perhaps
        excepted."""
        got: list[int] = []
        for _ in range(5):
            self.hardware.finish(but=None if computes else self.device.compute.queue)
            got += [message.microbatch for message in self.links[1].arrivals()]
            if sender_looks:
                assert self.links[0].arrivals() == []
        return got


def test_a_header_waits_for_the_tensors_and_for_the_sends_before_it() -> None:
    """A receive of NCCL, which the header calls for, must never spin through a forward."""
    both = Frozen()
    both.send(0)
    both.send(1)

    assert both.settle(computes=False) == []
    assert both.pending(1) == [], "a receive was enqueued before its tensor was ready"
    both.hardware.finish()
    assert both.settle() == [0, 1]


@pytest.mark.parametrize("messages", [1, 2])
def test_nothing_waits_on_the_device_for_what_only_the_host_can_do(messages: int) -> None:
    """A host may stand in a call that waits for all work of its device: the allocator frees memory,
    a kernel is loaded. A send that spins without its header would keep it there for ever."""
    both = Frozen()
    for number in range(messages):
        both.send(number)
        if number < messages - 1:  # the last one is all that this host never looks after
            for _ in range(2):  # the tensor is ready, and the header has left
                both.hardware.finish()
                assert both.links[0].arrivals() == []

    assert both.settle(sender_looks=False) == list(range(messages - 1))
    assert both.pending(0) == []


def test_contents_wait_on_the_device_only_once_their_header_has_left() -> None:
    """An MPI library may keep a header until its host calls it again. A send that spins by then
    would keep a host for ever that stands in a call that waits for all work of its device."""
    both = Frozen()
    both.send(0)

    both.hardware.finish()
    for _ in range(2):
        both.links[0].push()
        [name] = both.pending(0)
        assert name.startswith("headers"), "the header is under way, and nothing is on the device"
    both.hardware.finish()
    both.links[0].push()
    [name] = both.pending(0)
    assert not name.startswith("headers"), "the send follows at the next look"
    assert both.settle() == [0]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_for_something_else_still_sends_its_messages(way: Way) -> None:
    def main(transport: SmallPieces) -> None:
        link = transport.link(Grid(2, 1).coords(transport.rank))
        if transport.rank == 0:
            tensor = transport.device.later(torch.ones(99))
            link.send(Message(Direction.FORWARD, 0, (tensor,)))
        while transport.rank == 1 and not link.arrivals():
            transport.backoff.pause()
        here = torch.zeros(1, dtype=torch.float64)
        wait(transport.world.start(Op.ALL_REDUCE, here), transport.backoff)

    on_standins(2, way, main, seed=2, make=SmallPieces)


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
            link = branch.link(Grid(2, 1).coords(rank))
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

    assert on_standins(2, way, main, seed=2) == [[2, 0] * 2] * 2


@pytest.mark.parametrize(("rank", "direction"), [(0, Direction.BACKWARD), (1, Direction.FORWARD)])
def test_a_gpu_message_to_no_neighbour_is_an_internal_error(
    rank: int, direction: Direction
) -> None:
    with pytest.raises(AssertionError, match="no such neighbour"):
        Frozen().links[rank].send(Message(direction, 0, (torch.zeros(1),)))


# -- in which order ranks connect to their peers --------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4, 7, 16])
def test_ranks_connect_and_close_in_one_order_however_many_stages_there_are(stages: int) -> None:
    """NCCL may hold up whoever makes or closes its end of a connection until the other one does."""
    shared: list[dict[object, object]] = []

    def main(transport: StandIn) -> None:
        transport.link(Grid(stages, 1).coords(transport.rank))
        shared.append(transport.device.hardware.shared)

    on_standins(stages, "nccl", main, seed=1)

    closed: dict[int, list[tuple[int, int]]] = {
        rank: shared[0]["closed", rank]  # type: ignore[misc]  # what the stand-in noted
        for rank in range(stages)
    }
    assert sum(map(len, closed.values())) == 4 * (stages - 1)
    made = {rank: peers[::-1] for rank, peers in closed.items()}
    assert _rounds(closed) <= 4 and _rounds(made) <= 4


def _rounds(left: dict[int, list[tuple[int, int]]]) -> int:
    """In how many rounds ranks come through their peers, each a meeting of its two ends."""
    rounds = 0
    while any(left.values()):
        wanted = Counter(peers[0] for peers in left.values() if peers)
        met = {peer for peer, ends in wanted.items() if ends == 2}
        assert met, "ranks wait for each other in a circle"
        left = {
            rank: peers[1:] if peers and peers[0] in met else peers for rank, peers in left.items()
        }
        rounds += 1
    return rounds
