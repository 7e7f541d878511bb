"""A `Wire` over MPI: bytes, with headers and contents on two tags of one communicator."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from torch import Tensor

from axsparse.runtime.communication import Direction
from axsparse.runtime.message_header import Header

HEADER_TAG, CONTENT_TAG = 1, 2


class MpiRequest:
    """One MPI request, and what it works on."""

    def __init__(self, request: MPI.Request, held: object) -> None:
        self._request = request
        self._held = held

    def done(self) -> bool:
        return bool(self._request.Test())


class MpiWire:
    """The wire to or from one rank of a communicator; pieces are in memory that MPI can reach:
    the host's, or a GPU's if the library is built for it."""

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        self._comm = comm
        self._peer = peer
        self._status = MPI.Status()

    def send_header(self, header: Header) -> MpiRequest:
        request = self._comm.Isend([header, MPI.INT64_T], dest=self._peer, tag=HEADER_TAG)
        return MpiRequest(request, header)

    def receive_header(self) -> Header | None:
        probed = self._comm.Improbe(self._peer, HEADER_TAG, self._status)
        if probed is None:
            return None
        header = np.empty(self._status.Get_count(MPI.INT64_T), dtype=np.int64)
        probed.Recv([header, MPI.INT64_T])
        return header

    def send(self, piece: Tensor) -> MpiRequest:
        request = self._comm.Isend([_buffer(piece), MPI.BYTE], dest=self._peer, tag=CONTENT_TAG)
        return MpiRequest(request, piece)

    def receive(self, piece: Tensor) -> MpiRequest:
        request = self._comm.Irecv([_buffer(piece), MPI.BYTE], source=self._peer, tag=CONTENT_TAG)
        return MpiRequest(request, piece)

    def close(self) -> None:
        """Nothing of its own: whoever made the communicator frees it."""


class MpiWires:
    """The wires of one rank to its neighbours: one communicator a direction."""

    def __init__(self, comm: MPI.Comm) -> None:
        """Collective over `comm`, whose ranks are those of the grid."""
        self._comms = {direction: comm.Dup() for direction in Direction}

    def wire(self, direction: Direction, source: int, target: int) -> MpiWire:
        """One end of a wire between neighbours, of which this rank is one."""
        comm = self._comms[direction]
        return MpiWire(comm, target if source == comm.rank else source)

    def close(self) -> None:
        """Free the communicators; every rank has closed its link."""
        for comm in self._comms.values():
            comm.Free()


def _buffer(piece: Tensor) -> object:
    """As mpi4py takes it: an array of host memory, a GPU's tensor by its own interface."""
    return piece.numpy() if piece.device.type == "cpu" else piece
