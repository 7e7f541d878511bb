"""The contract of `Link` over MPI, and what only MPI can get wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from support.link_contract import CONTRACT, LARGE
from support.on_mpi import on_mpi
from support.runs import all_here

from axsparse.runtime.communication import Direction, Link, Message, Transport
from axsparse.runtime.grid import Grid
from axsparse.runtime.host_channel import ChannelLink, encode_header
from axsparse.runtime.mpi.mpi_communication import CONTENT_TAG, HEADER_TAG, MpiChannel
from axsparse.runtime.mpi.mpi_transport import MpiTransport

SIZE = MPI.COMM_WORLD.size
needs_a_neighbour = pytest.mark.skipif(SIZE < 2, reason="one rank has no neighbour")


class SmallCalls(MpiTransport):
    max_call_bytes = 1000


def opened(transport: Transport) -> tuple[int, ChannelLink]:
    """This rank's stage of a pipeline of all ranks, and its link."""
    link: Link = transport.link(Grid(SIZE, 1).coords(transport.rank))
    assert isinstance(link, ChannelLink)
    return transport.rank, link


def forward_channel(link: ChannelLink) -> MpiChannel:
    ends = {**link._incoming, **link._outgoing}
    channel, _ = ends[Direction.FORWARD]
    assert isinstance(channel, MpiChannel)
    return channel


@needs_a_neighbour
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_an_mpi_link_keeps_the_contract(promise: Callable[[Transport], None]) -> None:
    """In small calls, but for what sends much."""
    with on_mpi(MpiTransport if promise in LARGE else SmallCalls) as transport:
        promise(transport)


@needs_a_neighbour
def test_a_message_that_is_complete_waits_for_those_before_it() -> None:
    with on_mpi() as transport:
        rank, link = opened(transport)
        if rank == 0:
            # A sender whose first content is slow, and whose second message has none.
            comm, content = forward_channel(link)._comm, torch.ones(3)
            for number, tensors in enumerate([(content,), ()]):
                header = encode_header(Message(Direction.FORWARD, number, tensors))
                comm.Send([header, MPI.INT64_T], dest=1, tag=HEADER_TAG)
            all_here(transport)
            comm.Send([content.numpy(), MPI.BYTE], dest=1, tag=CONTENT_TAG)
            return
        while rank == 1 and len(link._receiving[Direction.FORWARD]) < 2:
            assert link.arrivals() == []
            transport.backoff.pause()
        all_here(transport)

        numbers: list[int] = []
        while rank == 1 and len(numbers) < 2:
            numbers += [message.microbatch for message in link.arrivals()]
            transport.backoff.pause()
        assert numbers in ([0, 1], [])


class Absent:
    """A communicator on which the first look finds nothing, as MPI's may after an absence."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._looks = 0

    def Improbe(self, source: int, tag: int, status: MPI.Status) -> MPI.Message | None:
        self._looks += 1
        return None if self._looks == 1 else self._comm.Improbe(source, tag, status)


@needs_a_neighbour
def test_arrivals_are_complete_although_the_first_look_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with on_mpi() as transport:
        rank, link = opened(transport)
        if rank == 0:
            link.send(Message(Direction.FORWARD, 0, ()))
        if rank == 1:
            channel = forward_channel(link)
            comm = channel._comm
            while not comm.Iprobe(0, HEADER_TAG):
                transport.backoff.pause()
            with monkeypatch.context() as patched:
                patched.setattr(channel, "_comm", Absent(comm))
                assert [message.microbatch for message in link.arrivals()] == [0]


@needs_a_neighbour
def test_what_was_sent_arrives_though_its_sender_waits_for_something_else() -> None:
    """A stage without a GPU sums its gradients without looking after its link."""
    with on_mpi() as transport:
        rank, link = opened(transport)
        for number in range(100 if rank == 0 else 0):
            link.send(Message(Direction.FORWARD, number, (torch.ones(1000),)))
        left = 100 if rank == 1 else 0
        while left:
            left -= len(link.arrivals())
            transport.backoff.pause()
        all_here(transport)


@needs_a_neighbour
def test_closing_waits_for_what_was_sent() -> None:
    with on_mpi() as transport:
        rank, link = opened(transport)
        if rank < SIZE - 1:
            link.send(Message(Direction.FORWARD, 0, (torch.ones(1 << 21),)))
        while rank and not link.arrivals():
            transport.backoff.pause()

    assert link.unsent == 0
