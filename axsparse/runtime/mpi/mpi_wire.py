"""A `Wire` over MPI, and the only place that knows how a message looks to MPI.

Each direction has a communicator of its own. On it headers and contents travel under two tags,
and MPI keeps the order of what has the same sender, communicator and tag. Elements are bytes,
since MPI lacks types of torch's.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from torch import Tensor

from axsparse.runtime.communication import Direction
from axsparse.runtime.message_header import Header

HEADER_TAG, CONTENT_TAG = 1, 2


class MpiRequest(MPI.Request):
    """A send or receive as an `Event`; like every request of mpi4py it keeps its memory alive."""

    query = MPI.Request.Test


class MpiWire:
    """The wire to or from one rank of a communicator; pieces are in memory that MPI can reach:
    the host's, or a GPU's if the library is built for it."""

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
            self._comm.Isend([_buffer(piece), MPI.BYTE], dest=self._peer, tag=CONTENT_TAG)
        )

    def receive(self, piece: Tensor) -> MpiRequest:
        return MpiRequest(
            self._comm.Irecv([_buffer(piece), MPI.BYTE], source=self._peer, tag=CONTENT_TAG)
        )


class MpiWires:
    """The wires of one link, on two communicators."""

    def __init__(self, comm: MPI.Comm) -> None:
        """All ranks of `comm`, which are those of the grid, call this together."""
        self._comms = {direction: comm.Dup() for direction in Direction}

    def wire(self, direction: Direction, source: int, target: int) -> MpiWire:
        comm = self._comms[direction]
        return MpiWire(comm, target if source == comm.rank else source)

    def close(self) -> None:
        for comm in self._comms.values():
            comm.Free()


def _buffer(piece: Tensor) -> object:
    """A piece as mpi4py takes it: an array of host memory, or a GPU's tensor itself."""
    return piece.numpy() if piece.is_cpu else piece
