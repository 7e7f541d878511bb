"""A `Link` over MPI for tensors in host memory: bytes with a header, one communicator a direction.

Headers and contents travel on two tags of one communicator, so each is matched in
posting order; contents are received straight into tensors of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Backoff, Direction, Message
from axsparse.runtime.grid import Place
from axsparse.runtime.message_header import (
    Header,
    decode_header,
    dense,
    encode_header,
    in_host_memory,
)
from axsparse.runtime.mpi.mpi_wire import CONTENT_TAG, HEADER_TAG
from axsparse.runtime.wire import QUIET_PASSES, byte_pieces


def byte_chunks(tensor: Tensor, max_bytes: int) -> list[NDArray[np.uint8]]:
    """The bytes of a contiguous tensor, as views of at most `max_bytes` each."""
    return [piece.numpy() for piece in byte_pieces(tensor, max_bytes)]


@dataclass
class _Transfer:
    """A message under way, and what keeps it alive."""

    message: Message
    requests: list[MPI.Request]
    header: Header


class MpiLink:
    """Neighbouring stages of one replica over MPI; neither call waits."""

    def __init__(
        self,
        comm: MPI.Comm,
        place: Place,
        backoff: Backoff,
        max_call_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        """Collective over `comm`, whose ranks are those of the grid."""
        self.bytes_sent = 0
        self._comms = {direction: comm.Dup() for direction in Direction}
        self._backoff = backoff
        self._max_call_bytes = max_call_bytes
        before = None if place.is_first else place.rank - 1
        after = None if place.is_last else place.rank + 1
        self._sources = {Direction.FORWARD: before, Direction.BACKWARD: after}
        self._targets = {Direction.FORWARD: after, Direction.BACKWARD: before}
        self._receiving: dict[Direction, deque[_Transfer]] = {d: deque() for d in Direction}
        self._sending: deque[_Transfer] = deque()

    def send(self, message: Message) -> None:
        target = self._targets[message.direction]
        assert target is not None, "no such neighbour"
        message = dense(message)
        header = encode_header(message)
        comm = self._comms[message.direction]
        requests = [comm.Isend([header, MPI.INT64_T], dest=target, tag=HEADER_TAG)]
        for tensor in message.tensors:
            if tensor is not None:
                self.bytes_sent += tensor.nbytes
                requests += [
                    comm.Isend([chunk, MPI.BYTE], dest=target, tag=CONTENT_TAG)
                    for chunk in byte_chunks(tensor, self._max_call_bytes)
                ]
        self._sending.append(_Transfer(message, requests, header))

    def arrivals(self) -> list[Message]:
        self.push()
        messages: list[Message] = []
        quiet = 0
        while quiet < QUIET_PASSES:
            quiet = 0 if self._collect(messages) else quiet + 1
        return messages

    def push(self) -> None:
        while self._sending and MPI.Request.Testall(self._sending[0].requests):
            self._sending.popleft()

    @property
    def unsent(self) -> int:
        return len(self._sending)

    def close(self) -> None:
        self._backoff.reset()
        while self._sending:
            self.push()
            self._backoff.pause()
        for comm in self._comms.values():
            comm.Free()

    def _collect(self, messages: list[Message]) -> bool:
        """One look at both directions, adding what is complete; whether anything moved."""
        moved = False
        for direction, source in self._sources.items():
            if source is None:
                continue
            moved |= self._accept_headers(direction, source)
            receiving = self._receiving[direction]
            while receiving and MPI.Request.Testall(receiving[0].requests):
                messages.append(receiving.popleft().message)
                moved = True
        return moved

    def _accept_headers(self, direction: Direction, source: int) -> bool:
        """Post the receives of every message whose header is here; whether there was any."""
        comm = self._comms[direction]
        status = MPI.Status()
        found = False
        while (probed := comm.Improbe(source, HEADER_TAG, status)) is not None:
            found = True
            header = np.empty(status.Get_count(MPI.INT64_T), dtype=np.int64)
            probed.Recv([header, MPI.INT64_T])
            message = decode_header(header, direction, in_host_memory)
            requests = [
                comm.Irecv([chunk, MPI.BYTE], source=source, tag=CONTENT_TAG)
                for tensor in message.tensors
                if tensor is not None
                for chunk in byte_chunks(tensor, self._max_call_bytes)
            ]
            self._receiving[direction].append(_Transfer(message, requests, header))
        return found
