"""A `Link` over MPI for tensors in host memory, and the channels that it is made of.

A message is its header and then the bytes of its tensors, all on the channel of its direction.
Contents are received straight into the tensors that the message is made of.

`MpiChannel` is the only place that knows how a message looks to MPI. Each direction has a separate
communicator. On it headers and contents travel under two tags, and MPI keeps the order of messages
with the same sender, communicator and tag. Elements are bytes, since MPI lacks types of torch's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Backoff, Direction, Message
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.host_channel import (
    QUIET_PASSES,
    Header,
    byte_pieces,
    decode_header,
    dense,
    encode_header,
    in_host_memory,
    neighbours,
)

HEADER_TAG, CONTENT_TAG = 1, 2


@dataclass
class _Transfer:
    """A message under way, which keeps its tensors alive."""

    message: Message
    requests: list[MpiRequest]

    def query(self) -> bool:
        """Whether all of the message has been sent or received."""
        # One call for all requests takes less time than one for each.
        return bool(MPI.Request.Testall(self.requests))


class MpiLink:
    """The link of one rank to the neighbouring stages of its replica."""

    def __init__(
        self,
        comm: MPI.Comm,
        coords: RankCoords,
        backoff: Backoff,
        max_call_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        """All ranks of `comm`, which are the ranks of the grid, call this together.

        No call of MPI carries more than `max_call_bytes`, the same number on all ranks.
        """
        self.bytes_sent = 0
        self._backoff = backoff
        self._max_call_bytes = max_call_bytes
        self._channels = MpiChannels(comm)
        self._outgoing: dict[Direction, MpiChannel] = {}
        self._incoming: dict[Direction, MpiChannel] = {}
        for direction in Direction:
            for source, target in neighbours(coords, direction):
                channels = self._outgoing if source == coords.rank else self._incoming
                channels[direction] = self._channels.channel(direction, source, target)
        self._sending: deque[_Transfer] = deque()
        self._receiving: dict[Direction, deque[_Transfer]] = {d: deque() for d in Direction}

    def send(self, message: Message) -> None:
        assert message.direction in self._outgoing, "no such neighbour"
        channel = self._outgoing[message.direction]
        message = dense(message)
        header = channel.send_header(encode_header(message))
        self.bytes_sent += sum(tensor.nbytes for tensor in message.tensors if tensor is not None)
        self._sending.append(_Transfer(message, [header, *self._each_piece(message, channel.send)]))

    def arrivals(self) -> list[Message]:
        self.push()
        messages: list[Message] = []
        quiet = 0
        while quiet < QUIET_PASSES:
            quiet = 0 if self._collect(messages) else quiet + 1
        return messages

    def push(self) -> None:
        while self._sending and self._sending[0].query():
            self._sending.popleft()

    @property
    def unsent(self) -> int:
        return len(self._sending)

    def close(self) -> None:
        self._backoff.reset()
        while self._sending:
            self.push()
            self._backoff.pause()
        self._channels.close()

    def _collect(self, messages: list[Message]) -> bool:
        """Look at both directions once and add complete messages; returns whether anything
        moved."""
        moved = False
        for direction, channel in self._incoming.items():
            receiving = self._receiving[direction]
            while (header := channel.receive_header()) is not None:
                moved = True
                message = decode_header(header, direction, in_host_memory)
                receiving.append(_Transfer(message, self._each_piece(message, channel.receive)))
            while receiving and receiving[0].query():
                messages.append(receiving.popleft().message)
                moved = True
        return moved

    def _each_piece(
        self, message: Message, start: Callable[[Tensor], MpiRequest]
    ) -> list[MpiRequest]:
        """Start the sends or receives of a message's contents."""
        return [
            start(piece)
            for tensor in message.tensors
            if tensor is not None
            for piece in byte_pieces(tensor, self._max_call_bytes)
        ]


class MpiRequest(MPI.Request):
    """A send or receive as an `Event`; like every request of mpi4py it keeps its memory alive."""

    query = MPI.Request.Test


class MpiChannel:
    """The channel to or from one rank of a communicator; pieces are in the host's
    memory."""

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        """`peer` is the rank at the other end."""
        self._comm = comm
        self._peer = peer
        self._status = MPI.Status()

    def send_header(self, header: Header) -> MpiRequest:
        return MpiRequest(self._comm.Isend([header, MPI.INT64_T], dest=self._peer, tag=HEADER_TAG))

    def receive_header(self) -> Header | None:
        probed = self._comm.Improbe(self._peer, HEADER_TAG, self._status)
        if probed is None:
            return None
        header = np.empty(self._status.Get_count(MPI.INT64_T), dtype=np.int64)
        probed.Recv([header, MPI.INT64_T])
        return header

    def send(self, piece: Tensor) -> MpiRequest:
        return MpiRequest(
            self._comm.Isend([piece.numpy(), MPI.BYTE], dest=self._peer, tag=CONTENT_TAG)
        )

    def receive(self, piece: Tensor) -> MpiRequest:
        return MpiRequest(
            self._comm.Irecv([piece.numpy(), MPI.BYTE], source=self._peer, tag=CONTENT_TAG)
        )


class MpiChannels:
    """The channels of one link, on two communicators."""

    def __init__(self, comm: MPI.Comm) -> None:
        """All ranks of `comm`, which are the ranks of the grid, call this together."""
        self._comms = {direction: comm.Dup() for direction in Direction}

    def channel(self, direction: Direction, source: int, target: int) -> MpiChannel:
        comm = self._comms[direction]
        return MpiChannel(comm, target if source == comm.rank else source)

    def close(self) -> None:
        for comm in self._comms.values():
            comm.Free()
