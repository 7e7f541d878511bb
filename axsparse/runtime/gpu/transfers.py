"""The two ways in which a message's contents travel between GPUs, each a sender and a receiver.

`NcclSender` and `NcclReceiver` use NCCL, from GPU to GPU. Each direction between two neighbours
has a peer connection of its own, so that neither can hold up the other.

`Staged` is both, and uses the channel between the hosts. It copies contents into and out of a ring
of pinned slots, memory of the host that the GPU reaches without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.runtime.communication import Direction, Event
from axsparse.runtime.gpu.device_protocol import Connections, Device, PeerConnection
from axsparse.runtime.grid import Place
from axsparse.runtime.host_channel import HostChannel, as_bytes, byte_pieces, neighbours

SLOTS = 3
"""Pinned slots of one end of one direction: one is filled, one is on its way, one is emptied."""
SLOT_BYTES = 16 << 20
"""The size of a slot and of a piece; it is the same on all ranks."""


class _NcclSend:
    """The contents of one message, which wait for their turn, then until their header has left,
    and then for the receiver."""

    def __init__(self, connection: PeerConnection, tensors: Sequence[Tensor], ready: Event) -> None:
        self._connection = connection
        self._tensors = tensors
        self._ready = ready
        self._is_next = False
        self._sends: _Transfers | None = None

    def take_turn(self) -> bool:
        """Let the header go if the tensors are ready; called once nothing is in front of them."""
        self._is_next = self._ready.query()
        return self._is_next

    def begun(self) -> bool:
        return self._is_next

    def header_left(self) -> None:
        if self._sends is None:
            # NCCL knows no int16, so contents go as bytes; with 64-bit counts they need no cutting.
            self._sends = _Transfers([self._connection.send(as_bytes(t)) for t in self._tensors])
            self._tensors = ()

    def query(self) -> bool:
        return self._sends is not None and self._sends.query()


class _Transfers:
    """The transfers of one message on a peer connection, in order, as one event."""

    def __init__(self, transfers: list[Event]) -> None:
        self._left = transfers

    def query(self) -> bool:
        while self._left and self._left[0].query():
            self._left.pop(0)
        return not self._left


class NcclSender:
    """Enqueues a send on the device once its header has left and nothing is in front of it.

    A send spins on the device until its receive runs. If it were enqueued earlier, it could begin
    while the host is in a call that waits for the whole device, such as the allocator's last
    resort or the loading of a kernel. The header would then never go, and both would wait for
    ever.
    """

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection
        self._waiting: deque[_NcclSend] = deque()
        self._last: _NcclSend | None = None
        """The only message whose header may go, since the host could not tell when a send behind
        another begins on the device."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> _NcclSend:
        sent = _NcclSend(self._connection, tensors, ready)
        self._waiting.append(sent)
        self.advance()
        return sent

    def advance(self) -> None:
        if self._last is not None and self._last.query():
            self._last = None
        if self._last is None and self._waiting and self._waiting[0].take_turn():
            self._last = self._waiting.popleft()


class NcclReceiver:
    """Enqueues receives at once; they are asked for when their header has arrived."""

    def __init__(self, connection: PeerConnection) -> None:
        self._connection = connection

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._connection.stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        return _Transfers([self._connection.receive(as_bytes(tensor)) for tensor in tensors])

    def advance(self) -> None:
        """Do nothing, since nothing waits for the host."""


def connect_peers(
    connections: Connections, place: Place, name: str
) -> dict[tuple[int, int], PeerConnection]:
    """This rank's ends of all connections to its neighbours, by (source, target).

    The two ends of a connection wait for each other when they make it. Ranks go through four
    rounds: forward ones that start at even stages, forward ones that start at odd stages, and
    backward ones likewise. Each rank makes at most one a round, so that no rank waits for a chain
    of others, however many stages there are. `name` tells links of the same ranks apart.
    """
    made: dict[tuple[int, int], PeerConnection] = {}
    for direction in Direction:
        for parity in (0, 1):
            for source, target in neighbours(place, direction):
                stage = place.grid.place(source).stage
                if stage % 2 == parity:
                    made[source, target] = connections.peer(name, source, target)
    return made


class StagedTransfer:
    """The contents of one message on their way: a `PendingSend`, and an event of their arrival."""

    def __init__(self, pieces: int, ready: Event | None) -> None:
        """`ready` completes when the contents may be read; None at the receiving end."""
        self.ready = ready
        self.left = pieces
        """Pieces that have not been sent, or have not arrived."""

    def begun(self) -> bool:
        return self.ready is None or self.ready.query()

    def header_left(self) -> None:
        """Do nothing, since these contents wait for no receiver on the GPU."""

    def query(self) -> bool:
        return not self.left


@dataclass
class _Piece:
    """Some bytes of a tensor on the device, and the message that they belong to."""

    content: Tensor
    transfer: StagedTransfer


@dataclass
class _Filling:
    """A slot in use, and what is done to its piece at the moment."""

    slot: Tensor
    part: Tensor
    """The part of the slot that the piece fills."""
    piece: _Piece
    event: Event


class Staged:
    """The sender or the receiver of one direction, by way of pinned memory.

    A sender copies each piece from the device to a slot and sends it from there; a receiver
    receives it into a slot and copies it to the device. Pieces move in order, those without a slot
    wait, and a slot is filled anew only once its piece is through.
    """

    def __init__(
        self, channel: HostChannel, device: Device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._channel = channel
        self._stream = device.stream()
        self._slot_bytes = slot_bytes
        self._free = deque(device.pinned(slot_bytes) for _ in range(slots))
        self._waiting: deque[_Piece] = deque()
        self._first: deque[_Filling] = deque()
        """Pieces on their way into a slot."""
        self._second: deque[_Filling] = deque()
        """Pieces on their way out of a slot."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def send(self, tensors: Sequence[Tensor], ready: Event) -> StagedTransfer:
        return self._enqueue(tensors, ready)

    def receive(self, tensors: Sequence[Tensor]) -> StagedTransfer:
        return self._enqueue(tensors, None)

    def advance(self) -> None:
        while self._second and self._second[0].event.query():
            through = self._second.popleft()
            self._free.append(through.slot)
            through.piece.transfer.left -= 1
        while self._first and self._first[0].event.query():
            full = self._first.popleft()
            full.event = self._empty_slot(full.part, full.piece)
            self._second.append(full)
        while self._free and self._waiting:
            slot, piece = self._free.popleft(), self._waiting.popleft()
            part = slot[: piece.content.numel()]
            self._first.append(_Filling(slot, part, piece, self._fill_slot(part, piece)))

    def _enqueue(self, tensors: Sequence[Tensor], ready: Event | None) -> StagedTransfer:
        """Let the pieces of a message wait for slots."""
        pieces = [piece for tensor in tensors for piece in byte_pieces(tensor, self._slot_bytes)]
        transfer = StagedTransfer(len(pieces), ready)
        self._waiting.extend(_Piece(content, transfer) for content in pieces)
        self.advance()
        return transfer

    def _fill_slot(self, part: Tensor, piece: _Piece) -> Event:
        ready = piece.transfer.ready
        if ready is None:
            return self._channel.receive(part)
        # The stream waits for this message only now, so that no piece of an earlier one has to
        # wait for it.
        self._stream.wait(ready)
        self._stream.copy(part, piece.content)
        return self._stream.record()

    def _empty_slot(self, part: Tensor, piece: _Piece) -> Event:
        if piece.transfer.ready is not None:
            return self._channel.send(part)
        self._stream.copy(piece.content, part)
        return self._stream.record()
