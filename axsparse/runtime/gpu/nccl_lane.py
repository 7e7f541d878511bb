"""The lane that carries contents over NCCL, from GPU to GPU.

Each direction between two neighbours has an edge of its own, so that neither can hold up the
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from axsparse.runtime.communication import Direction, Event
from axsparse.runtime.gpu.device_protocol import Connections, DeviceEdge
from axsparse.runtime.grid import Place
from axsparse.runtime.wire import as_bytes, neighbours


class _Departure:
    """The contents of one message, which wait for their turn, then until their header has left,
    and then for the receiver."""

    def __init__(self, edge: DeviceEdge, tensors: Sequence[Tensor], ready: Event) -> None:
        self._edge = edge
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
            self._sends = _Transfers([self._edge.send(as_bytes(t)) for t in self._tensors])
            self._tensors = ()

    def query(self) -> bool:
        return self._sends is not None and self._sends.query()


class _Transfers:
    """The transfers of one message on an edge, in order, as one event."""

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

    def __init__(self, edge: DeviceEdge) -> None:
        self._edge = edge
        self._waiting: deque[_Departure] = deque()
        self._last: _Departure | None = None
        """The only message whose header may go, since the host could not tell when a send behind
        another begins on the device."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> _Departure:
        sent = _Departure(self._edge, tensors, ready)
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

    def __init__(self, edge: DeviceEdge) -> None:
        self._edge = edge

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._edge.stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        return _Transfers([self._edge.receive(as_bytes(tensor)) for tensor in tensors])

    def advance(self) -> None:
        """Do nothing, since nothing waits for the host."""


def connect_edges(
    connections: Connections, place: Place, name: str
) -> dict[tuple[int, int], DeviceEdge]:
    """This rank's ends of all edges to its neighbours, by (source, target).

    The two ends of an edge wait for each other when they make it. Ranks go through four rounds:
    forward edges that start at even stages, forward edges that start at odd ones, and backward
    edges likewise. Each rank has at most one edge a round, so that no rank waits for a chain of
    others, however many stages there are. `name` tells links of the same ranks apart.
    """
    edges: dict[tuple[int, int], DeviceEdge] = {}
    for direction in Direction:
        for parity in (0, 1):
            for source, target in neighbours(place, direction):
                stage = place.grid.place(source).stage
                if stage % 2 == parity:
                    edges[source, target] = connections.edge(name, source, target)
    return edges
