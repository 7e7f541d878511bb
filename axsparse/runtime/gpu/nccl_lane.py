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
    """The contents of one message, which wait for their turn and then for the receiver."""

    def __init__(self, tensors: Sequence[Tensor], ready: Event) -> None:
        self._tensors = tensors
        self._ready = ready
        self._after: Event | None = None

    def may_begin(self) -> bool:
        """Whether the tensors are ready."""
        return self._ready.query()

    def begin(self, edge: DeviceEdge) -> None:
        """Enqueue the sends on the device."""
        for tensor in self._tensors:
            # As bytes, since NCCL knows no int16, and in one piece, since its counts have 64 bits.
            edge.send(as_bytes(tensor))
        self._tensors = ()
        self._after = edge.stream.record()

    def begun(self) -> bool:
        return self._after is not None

    def query(self) -> bool:
        return self._after is not None and self._after.query()


class NcclSender:
    """Enqueues a send on the device when its header goes, once nothing is in front of it.

    A send spins on the device until its receive runs. If it were enqueued earlier, it could begin
    while the host is in a call that waits for the whole device, such as the allocator's last
    resort or the loading of a kernel. The header would then never go, and both would wait for
    ever.
    """

    def __init__(self, edge: DeviceEdge) -> None:
        self._edge = edge
        self._waiting: deque[_Departure] = deque()
        self._last: _Departure | None = None
        """The only message on the device, since the host could not tell when one behind it begins
        there."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> _Departure:
        sent = _Departure(tensors, ready)
        self._waiting.append(sent)
        self.advance()
        return sent

    def advance(self) -> None:
        if self._last is not None and self._last.query():
            self._last = None
        if self._last is None and self._waiting and self._waiting[0].may_begin():
            self._last = self._waiting.popleft()
            self._last.begin(self._edge)


class NcclReceiver:
    """Enqueues receives as soon as they are asked for, which is when their header is here."""

    def __init__(self, edge: DeviceEdge) -> None:
        self._edge = edge

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._edge.stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        for tensor in tensors:
            self._edge.receive(as_bytes(tensor))
        return self._edge.stream.record()

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
