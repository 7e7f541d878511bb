"""The lanes that carry contents over the wire between the hosts.

The staged lane copies them into and out of a ring of pinned slots, memory of the host that the
GPU reaches without waiting. The direct lane hands GPU memory to an MPI library that can read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.runtime.communication import MAX_CALL_BYTES, Event
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.wire import Wire, byte_pieces

SLOTS = 3
"""Pinned slots of one end of one direction: one is filled, one is on its way, one is emptied."""
SLOT_BYTES = 16 << 20
"""The size of a slot and of a piece; it is the same on all ranks."""


class Transit:
    """The contents of one message in a lane: a `Departure`, and an event of their arrival."""

    def __init__(self, pieces: int, ready: Event | None) -> None:
        """`ready` completes when the contents may be read; None at the receiving end."""
        self.ready = ready
        self._left = pieces

    def begun(self) -> bool:
        return self.ready is None or self.ready.query()

    def header_left(self) -> None:
        """Do nothing, since these contents wait for no receiver on the GPU."""

    def query(self) -> bool:
        return not self._left

    def count_piece(self) -> None:
        """Note that one more piece has been sent or has arrived."""
        self._left -= 1


@dataclass
class _Piece:
    """Some bytes of a tensor on the device, and the message that they belong to."""

    content: Tensor
    transit: Transit


def _cut(
    tensors: Sequence[Tensor], most: int, ready: Event | None = None
) -> tuple[Transit, list[_Piece]]:
    """A message's contents in pieces of at most `most` bytes."""
    contents = [piece for tensor in tensors for piece in byte_pieces(tensor, most)]
    transit = Transit(len(contents), ready)
    return transit, [_Piece(content, transit) for content in contents]


@dataclass
class _FullSlot:
    """A slot in use, the part of it that is filled, and the piece that fills it."""

    slot: Tensor
    part: Tensor
    piece: _Piece


class _Ring:
    """The pinned slots of one end, and the pieces that wait for one."""

    def __init__(self, device: Device, slots: int, slot_bytes: int) -> None:
        self._free = deque(device.pinned(slot_bytes) for _ in range(slots))
        self._slot_bytes = slot_bytes
        self._waiting: deque[_Piece] = deque()

    def enqueue(self, tensors: Sequence[Tensor], ready: Event | None = None) -> Transit:
        """Let the pieces of a message wait for slots."""
        transit, pieces = _cut(tensors, self._slot_bytes, ready)
        self._waiting.extend(pieces)
        return transit

    def fill(self) -> Iterator[_FullSlot]:
        """Give slots to waiting pieces, in order, as long as there are any."""
        while self._free and self._waiting:
            slot, piece = self._free.popleft(), self._waiting.popleft()
            yield _FullSlot(slot, slot[: piece.content.numel()], piece)

    def release(self, full: _FullSlot) -> None:
        """Take a slot back once its piece has been sent or has arrived."""
        self._free.append(full.slot)
        full.piece.transit.count_piece()


class StagedSender:
    """Copies each piece from the device to a pinned slot and sends it from there, in order.

    A slot is filled anew only once the wire is done with it. Pieces without a slot wait.
    """

    def __init__(
        self, wire: Wire, device: Device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._wire = wire
        self._stream = device.stream()
        self._ring = _Ring(device, slots, slot_bytes)
        self._copying: deque[tuple[_FullSlot, Event]] = deque()
        self._travelling: deque[tuple[_FullSlot, Event]] = deque()

    def send(self, tensors: Sequence[Tensor], ready: Event) -> Transit:
        transit = self._ring.enqueue(tensors, ready)
        self.advance()
        return transit

    def advance(self) -> None:
        while self._travelling and self._travelling[0][1].query():
            self._ring.release(self._travelling.popleft()[0])
        while self._copying and self._copying[0][1].query():
            full, _ = self._copying.popleft()
            self._travelling.append((full, self._wire.send(full.part)))
        for full in self._ring.fill():
            assert full.piece.transit.ready is not None
            # The stream waits for this message only now, so that no piece of an earlier one has
            # to wait for it.
            self._stream.wait(full.piece.transit.ready)
            self._stream.copy(full.part, full.piece.content)
            self._copying.append((full, self._stream.record()))


class StagedReceiver:
    """Receives each piece into a pinned slot and copies it to the device, in order.

    A slot is filled anew only once the copy to the device is done with it.
    """

    def __init__(
        self, wire: Wire, device: Device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._wire = wire
        self._stream = device.stream()
        self._ring = _Ring(device, slots, slot_bytes)
        self._travelling: deque[tuple[_FullSlot, Event]] = deque()
        self._copying: deque[tuple[_FullSlot, Event]] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Transit:
        transit = self._ring.enqueue(tensors)
        self.advance()
        return transit

    def advance(self) -> None:
        while self._copying and self._copying[0][1].query():
            self._ring.release(self._copying.popleft()[0])
        while self._travelling and self._travelling[0][1].query():
            full, _ = self._travelling.popleft()
            self._stream.copy(full.piece.content, full.part)
            self._copying.append((full, self._stream.record()))
        for full in self._ring.fill():
            self._travelling.append((full, self._wire.receive(full.part)))


class DirectSender:
    """Sends from GPU memory, by an MPI library that can read it (CUDA-aware)."""

    def __init__(self, wire: Wire, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        self._wire = wire
        self._max_call_bytes = max_call_bytes
        self._waiting: deque[_Piece] = deque()
        self._travelling: deque[tuple[_Piece, Event]] = deque()

    def send(self, tensors: Sequence[Tensor], ready: Event) -> Transit:
        transit, pieces = _cut(tensors, self._max_call_bytes, ready)
        self._waiting.extend(pieces)
        self.advance()
        return transit

    def advance(self) -> None:
        # MPI waits for no stream, so a piece goes only once its tensor is ready.
        while self._waiting and self._waiting[0].transit.begun():
            piece = self._waiting.popleft()
            self._travelling.append((piece, self._wire.send(piece.content)))
        while self._travelling and self._travelling[0][1].query():
            self._travelling.popleft()[0].transit.count_piece()


class DirectReceiver:
    """Receives into GPU memory.

    Nothing is ever enqueued on the stream that the memory comes from, so its memory is free at
    once. MPI, which knows no streams, needs that.
    """

    def __init__(self, wire: Wire, device: Device, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        self._wire = wire
        self._stream = device.stream()
        self._max_call_bytes = max_call_bytes
        self._travelling: deque[tuple[_Piece, Event]] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Transit:
        transit, pieces = _cut(tensors, self._max_call_bytes)
        self._travelling.extend((piece, self._wire.receive(piece.content)) for piece in pieces)
        return transit

    def advance(self) -> None:
        while self._travelling and self._travelling[0][1].query():
            self._travelling.popleft()[0].transit.count_piece()
