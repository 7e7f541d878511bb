"""The channels of a link over MPI: the only place that knows how a message looks to MPI.

Each direction has a separate communicator. On it headers and contents travel under two tags, and
MPI keeps the order of messages with the same sender, communicator and tag. Elements are bytes,
since MPI lacks types of torch's.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from torch import Tensor

from axsparse.runtime.communication import Direction
from axsparse.runtime.host_channel import Header

HEADER_TAG, CONTENT_TAG = 1, 2


class MpiRequest(MPI.Request):
    """A send or receive as an `Event`; like every request of mpi4py it keeps its memory alive."""

    query = MPI.Request.Test


class MpiChannel:
    """A `HostChannel` to or from one rank of a communicator; pieces are in the host's memory."""

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
        """This rank's end of the channel from `source` to `target`, of which it is one."""
        comm = self._comms[direction]
        return MpiChannel(comm, target if source == comm.rank else source)

    def close(self) -> None:
        """Release the channels, on which nothing is under way any more."""
        for comm in self._comms.values():
            comm.Free()
