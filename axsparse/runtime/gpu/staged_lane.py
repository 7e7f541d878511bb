"""Contents of messages by way of the host: through a ring of pinned slots, or straight from
GPU memory where the MPI library is built for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Event
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.wire import Request, Wire, byte_pieces

SLOTS = 3
"""Pinned slots of one end of one direction: one is filled, one is on its way, one is emptied."""
SLOT_BYTES = 16 << 20
"""Bytes a slot; both ends of a wire cut messages into pieces of this size. Part of what two
ranks have to agree on."""


class Transit:
    """A message's contents in the lane, until its last piece is through."""

    def __init__(self, pieces: int, ready: Event | None = None) -> None:
        self._left = pieces
        self._ready = ready

    def begun(self) -> bool:
        return self._ready is None or self._ready.query()

    def done(self) -> bool:
        return not self._left

    def query(self) -> bool:
        """An arrival, as an event."""
        return self.done()

    def passed(self) -> None:
        """One more piece is through."""
        self._left -= 1


@dataclass
class _Piece:
    """Some bytes of a tensor on the device, and the message that they belong to."""

    content: Tensor
    transit: Transit
    ready: Event | None = None
    """What its copy waits for."""


@dataclass
class _SlotUse:
    """A slot in use, and the part of it that is."""

    slot: Tensor
    part: Tensor
    piece: _Piece


class _Ring:
    """Pinned slots of one end, and the pieces that wait for one."""

    def __init__(self, device: Device, slots: int, slot_bytes: int) -> None:
        self._free = deque(device.pinned(slot_bytes) for _ in range(slots))
        self._slot_bytes = slot_bytes
        self._waiting: deque[_Piece] = deque()

    def enqueue(self, tensors: Sequence[Tensor], ready: Event | None = None) -> Transit:
        """Cut a message into pieces."""
        contents = _pieces(tensors, self._slot_bytes)
        transit = Transit(len(contents), ready)
        self._waiting.extend(_Piece(content, transit, ready) for content in contents)
        return transit

    def fill(self) -> Iterator[_SlotUse]:
        """Waiting pieces, in order, as long as there are slots for them."""
        while self._free and self._waiting:
            slot, piece = self._free.popleft(), self._waiting.popleft()
            yield _SlotUse(slot, slot[: piece.content.numel()], piece)

    def release(self, filled: _SlotUse) -> None:
        """A piece is through: its slot may be filled anew."""
        self._free.append(filled.slot)
        filled.piece.transit.passed()


class StagedOutgoing:
    """Device → pinned slot → wire, a piece at a time, in order.

    A slot is filled anew only once the wire is done with it. Pieces without a slot wait.
    """

    def __init__(
        self, wire: Wire, device: Device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._wire = wire
        self._stream = device.stream()
        self._ring = _Ring(device, slots, slot_bytes)
        self._copying: deque[tuple[_SlotUse, Event]] = deque()
        self._travelling: deque[tuple[_SlotUse, Request]] = deque()

    def send(self, tensors: Sequence[Tensor], ready: Event) -> Transit:
        transit = self._ring.enqueue(tensors, ready)
        self.advance()
        return transit

    def advance(self) -> None:
        while self._travelling and self._travelling[0][1].done():
            self._ring.release(self._travelling.popleft()[0])
        while self._copying and self._copying[0][1].query():
            filled, _ = self._copying.popleft()
            self._travelling.append((filled, self._wire.send(filled.part)))
        for filled in self._ring.fill():
            assert filled.piece.ready is not None
            # Only now, so that no piece waits for a message behind it.
            self._stream.wait(filled.piece.ready)
            self._stream.copy(filled.part, filled.piece.content)
            self._copying.append((filled, self._stream.record()))


class StagedIncoming:
    """Wire → pinned slot → device, a piece at a time, in order.

    A slot is filled anew only once the copy to the device is done with it.
    """

    def __init__(
        self, wire: Wire, device: Device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._wire = wire
        self._stream = device.stream()
        self._ring = _Ring(device, slots, slot_bytes)
        self._travelling: deque[tuple[_SlotUse, Request]] = deque()
        self._copying: deque[tuple[_SlotUse, Event]] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Transit:
        transit = self._ring.enqueue(tensors)
        self.advance()
        return transit

    def advance(self) -> None:
        while self._copying and self._copying[0][1].query():
            self._ring.release(self._copying.popleft()[0])
        while self._travelling and self._travelling[0][1].done():
            filled, _ = self._travelling.popleft()
            self._stream.copy(filled.piece.content, filled.part)
            self._copying.append((filled, self._stream.record()))
        for filled in self._ring.fill():
            self._travelling.append((filled, self._wire.receive(filled.part)))


class DirectOutgoing:
    """GPU memory handed to an MPI library that is built for it (CUDA-aware)."""

    def __init__(self, wire: Wire, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        self._wire = wire
        self._max_call_bytes = max_call_bytes
        self._waiting: deque[_Piece] = deque()
        self._travelling: deque[tuple[_Piece, Request]] = deque()

    def send(self, tensors: Sequence[Tensor], ready: Event) -> Transit:
        contents = _pieces(tensors, self._max_call_bytes)
        transit = Transit(len(contents), ready)
        self._waiting.extend(_Piece(content, transit) for content in contents)
        self.advance()
        return transit

    def advance(self) -> None:
        # MPI waits for no stream, so a piece goes only once its tensor is ready.
        while self._waiting and self._waiting[0].transit.begun():
            piece = self._waiting.popleft()
            self._travelling.append((piece, self._wire.send(piece.content)))
        while self._travelling and self._travelling[0][1].done():
            self._travelling.popleft()[0].transit.passed()


class DirectIncoming:
    """MPI writes to GPU memory.

    Nothing is ever enqueued on the stream that the memory comes from: what its pool hands
    out is free at once, as MPI, which knows no streams, needs it.
    """

    def __init__(self, wire: Wire, device: Device, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        self._wire = wire
        self._stream = device.stream()
        self._max_call_bytes = max_call_bytes
        self._travelling: deque[tuple[_Piece, Request]] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Transit:
        contents = _pieces(tensors, self._max_call_bytes)
        transit = Transit(len(contents))
        for content in contents:
            self._travelling.append((_Piece(content, transit), self._wire.receive(content)))
        return transit

    def advance(self) -> None:
        while self._travelling and self._travelling[0][1].done():
            self._travelling.popleft()[0].transit.passed()


def _pieces(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    return [piece for tensor in tensors for piece in byte_pieces(tensor, most)]
