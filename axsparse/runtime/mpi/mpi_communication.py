"""Channels and a `Collective` over MPI: the only place that knows how a message looks to MPI.

Each direction of a link has a separate communicator. On it headers and contents travel under two
tags, and MPI keeps the order of messages with the same sender, communicator and tag. Elements are
bytes, since MPI lacks types of torch's.

A reduction is an exchange in two phases on two communicators (docs/decisions/003): every shard goes
to its owner, who adds the parts in rank order, and the sums are gathered. Buffers of float64 hold
small agreements in which every element has one non-zero contributor, so that MPI's own sum is exact
in any order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.communication import (
    MAX_CALL_BYTES,
    Backoff,
    Direction,
    Op,
    shard_bounds,
    wait_for,
)
from axsparse.runtime.exchange import exchanged_bytes, store_sum_in_rank_order
from axsparse.runtime.host_channel import Header

HEADER_TAG, CONTENT_TAG = 1, 2


class MpiRequest(MPI.Request):
    """A send or receive as an `Event`; like every request of mpi4py it keeps its memory alive."""

    query = MPI.Request.Test


def duplicated(comm: MPI.Comm, backoff: Backoff) -> MPI.Comm:
    """A duplicate of a communicator, whose ranks call this together and pause until all have come;
    `Dup` would block, and a watchdog would take who waits there for the rank that hangs."""
    duplicate, request = comm.Idup()
    wait_for(MpiRequest(request), backoff)
    return duplicate


class MpiChannel:
    """A `HostChannel` to or from one rank of a communicator; pieces are in the host's memory."""

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
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

    def __init__(self, comm: MPI.Comm, backoff: Backoff) -> None:
        """All ranks of `comm`, which are the ranks of the grid, call this together."""
        self._comms = {direction: duplicated(comm, backoff) for direction in Direction}

    def channel(self, direction: Direction, source: int, target: int) -> MpiChannel:
        """This rank's end of the channel from `source` to `target`, of which it is one."""
        comm = self._comms[direction]
        return MpiChannel(comm, target if source == comm.rank else source)

    def close(self) -> None:
        """Release the channels, on which nothing is under way any more."""
        for comm in self._comms.values():
            comm.Free()


Requests = list[MPI.Request]


@dataclass(eq=False)
class MpiWork:
    """An operation of up to two phases, which its `MpiCollective` moves on in order."""

    owner: MpiCollective
    buffer: Tensor
    """Kept here, since mpi4py's Iallreduce and Iallgatherv do not keep their memory alive."""
    requests: Requests
    """The requests of the present phase."""
    second: Callable[[], Requests] | None
    """Begins the second phase; None once the last phase has begun."""

    def poll(self) -> bool:
        self.owner.advance()
        return self.complete

    @property
    def complete(self) -> bool:
        return self.second is None and not self.requests

    def advance(self) -> None:
        """Begin the next phase if the requests of the present one have completed."""
        if self.requests and not MPI.Request.Testall(self.requests):
            return
        self.requests = []
        if self.second is not None:
            second, self.second = self.second, None
            self.requests = second()


class MpiCollective:
    """Operations over the ranks of one communicator."""

    def __init__(
        self, comm: MPI.Comm, backoff: Backoff, max_call_bytes: int = MAX_CALL_BYTES
    ) -> None:
        """All ranks of `comm` call this together. No call of MPI carries more than `max_call_bytes`
        to a rank, the same number on all ranks."""
        self.rank = comm.rank
        self.size = comm.size
        self.bytes_sent = 0
        self._backoff = backoff
        self._max_call_bytes = max_call_bytes
        self._scattering = duplicated(comm, backoff)
        self._gathering = duplicated(comm, backoff)
        self._works: deque[MpiWork] = deque()

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> MpiWork:
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        work = MpiWork(self, buffer, *self._phases(op, buffer, limits))
        self._works.append(work)
        self.advance()
        return work

    def advance(self) -> None:
        """Move all operations on; none begins its second phase before all earlier ones have."""
        for work in self._works:
            work.advance()
            if work.second is not None:
                break
        while self._works and self._works[0].complete:
            self._works.popleft()

    def close(self) -> None:
        """Wait for the running operations and free the communicators."""
        self._backoff.reset()
        while self._works:
            self.advance()
            self._backoff.pause()
        self._scattering.Free()
        self._gathering.Free()

    def _phases(
        self, op: Op, buffer: Tensor, bounds: list[int]
    ) -> tuple[Requests, Callable[[], Requests] | None]:
        """Begin the first phase; its requests, and how to begin the second phase, if any."""
        if self.size == 1:
            return [], None
        if op is Op.BROADCAST:
            pieces = [_bytes_of(buffer[begin:end]) for begin, end in self._pieces(buffer)]
            return [self._scattering.Ibcast([piece, MPI.BYTE], root=0) for piece in pieces], None
        if op is Op.ALL_REDUCE and buffer.dtype == torch.float64:
            # MPI adds, in an unspecified order.
            values = [buffer.numpy(), MPI.DOUBLE]
            return [self._scattering.Iallreduce(MPI.IN_PLACE, values, op=MPI.SUM)], None
        if op is Op.ALL_GATHER:
            return [], lambda: self._gather(buffer, bounds)
        requests, add = self._scatter(buffer, bounds)
        if op is Op.ALL_REDUCE:
            return requests, lambda: [*add(), *self._gather(buffer, bounds)]
        return requests, add

    def _scatter(
        self, buffer: Tensor, bounds: list[int]
    ) -> tuple[Requests, Callable[[], Requests]]:
        """Send every shard to its owner, in single messages, which MPICH moves faster than an
        `Ialltoallv`; the requests, and a function that adds the received shards."""
        requests: Requests = []
        received: list[tuple[list[Tensor], Tensor]] = []
        others = [rank for rank in range(self.size) if rank != self.rank]
        for begin, end in self._pieces(buffer):
            counts = self._split(bounds, begin, end)
            starts = itertools.accumulate(counts, initial=begin)
            shards = [buffer[at : at + count] for at, count in zip(starts, counts, strict=False)]
            shard = shards[self.rank]
            parts = [
                shard if rank == self.rank else torch.empty_like(shard) for rank in range(self.size)
            ]
            if shard.numel():
                requests += [
                    self._scattering.Irecv([_bytes_of(parts[o]), MPI.BYTE], o) for o in others
                ]
                received.append((parts, shard))
            for other in others:
                if counts[other]:
                    requests.append(
                        self._scattering.Isend([_bytes_of(shards[other]), MPI.BYTE], other)
                    )

        def add() -> Requests:
            for parts, shard in received:
                store_sum_in_rank_order(parts, shard)
            return []

        return requests, add

    def _gather(self, buffer: Tensor, bounds: list[int]) -> Requests:
        requests: Requests = []
        for begin, end in self._pieces(buffer):
            sizes = [count * buffer.itemsize for count in self._split(bounds, begin, end)]
            starts = [*itertools.accumulate(sizes[:-1], initial=0)]
            received = _bytes_of(buffer[begin:end]), (sizes, starts), MPI.BYTE
            requests.append(self._gathering.Iallgatherv(MPI.IN_PLACE, received))
        return requests

    def _pieces(self, buffer: Tensor) -> list[tuple[int, int]]:
        most = max(1, self._max_call_bytes // (buffer.itemsize * self.size))
        return [
            (begin, min(begin + most, buffer.numel())) for begin in range(0, buffer.numel(), most)
        ]

    def _split(self, bounds: list[int], begin: int, end: int) -> list[int]:
        """How many entries of [begin, end) lie in each rank's shard."""
        limits = [min(max(bound, begin), end) for bound in bounds]
        return [after - before for before, after in itertools.pairwise(limits)]


def _bytes_of(piece: Tensor) -> NDArray[np.uint8]:
    return piece.view(torch.uint8).numpy()
