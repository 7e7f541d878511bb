"""A `Link` over MPI for tensors in host memory, made of wires between neighbouring stages.

A message is its header and then the bytes of its tensors, all on the wire of its direction.
Contents are received straight into the tensors that the message is made of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Backoff, Direction, Message
from axsparse.runtime.grid import Place
from axsparse.runtime.message_header import decode_header, dense, encode_header, in_host_memory
from axsparse.runtime.mpi.mpi_wire import MpiRequest, MpiWire, MpiWires
from axsparse.runtime.wire import QUIET_PASSES, byte_pieces, neighbours


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
        place: Place,
        backoff: Backoff,
        max_call_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        """All ranks of `comm`, which are those of the grid, call this together.

        No call of MPI carries more than `max_call_bytes`, the same number on all ranks.
        """
        self.bytes_sent = 0
        self._backoff = backoff
        self._max_call_bytes = max_call_bytes
        self._wires = MpiWires(comm)
        self._outgoing: dict[Direction, MpiWire] = {}
        self._incoming: dict[Direction, MpiWire] = {}
        for direction in Direction:
            for source, target in neighbours(place, direction):
                wires = self._outgoing if source == place.rank else self._incoming
                wires[direction] = self._wires.wire(direction, source, target)
        self._sending: deque[_Transfer] = deque()
        self._receiving: dict[Direction, deque[_Transfer]] = {d: deque() for d in Direction}

    def send(self, message: Message) -> None:
        assert message.direction in self._outgoing, "no such neighbour"
        wire = self._outgoing[message.direction]
        message = dense(message)
        header = wire.send_header(encode_header(message))
        self.bytes_sent += sum(tensor.nbytes for tensor in message.tensors if tensor is not None)
        self._sending.append(_Transfer(message, [header, *self._each_piece(message, wire.send)]))

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
        self._wires.close()

    def _collect(self, messages: list[Message]) -> bool:
        """Look at both directions once and add what is complete; whether anything moved."""
        moved = False
        for direction, wire in self._incoming.items():
            receiving = self._receiving[direction]
            while (header := wire.receive_header()) is not None:
                moved = True
                message = decode_header(header, direction, in_host_memory)
                receiving.append(_Transfer(message, self._each_piece(message, wire.receive)))
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
