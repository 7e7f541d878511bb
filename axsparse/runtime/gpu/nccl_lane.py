"""Contents of messages over NCCL: each direction of each pair of neighbours has its own queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from axsparse.runtime.communication import Direction, Event
from axsparse.runtime.gpu.device_protocol import Connections, DeviceEdge
from axsparse.runtime.grid import Place
from axsparse.runtime.wire import as_bytes


class _Departure:
    """Contents that wait for their turn, and then for the receiver."""

    def __init__(self, tensors: Sequence[Tensor], ready: Event) -> None:
        self._tensors = tensors
        self._ready = ready
        self._after: Event | None = None

    def may_begin(self) -> bool:
        return self._ready.query()

    def begin(self, edge: DeviceEdge) -> None:
        for tensor in self._tensors:
            # As bytes: NCCL knows no int16. Its counts have 64 bits, so that nothing is split.
            edge.send(as_bytes(tensor))
        self._tensors = ()
        self._after = edge.stream.record()

    def begun(self) -> bool:
        return self._after is not None

    def done(self) -> bool:
        return self._after is not None and self._after.query()


class NcclOutgoing:
    """A send goes to the device together with its header, once nothing is in front of it.

    It spins there until its receive runs. Were it enqueued before, it could begin while the host
    is in a call that waits for the whole device (the allocator's last resort, the loading of a
    kernel): the header would never go, and both would wait for ever.
    """

    def __init__(self, edge: DeviceEdge) -> None:
        self._edge = edge
        self._waiting: deque[_Departure] = deque()
        self._last: _Departure | None = None
        """The one on the device; those behind it would begin there unseen."""

    def send(self, tensors: Sequence[Tensor], ready: Event) -> _Departure:
        sent = _Departure(tensors, ready)
        self._waiting.append(sent)
        self.advance()
        return sent

    def advance(self) -> None:
        if self._last is not None and self._last.done():
            self._last = None
        if self._last is None and self._waiting and self._waiting[0].may_begin():
            self._last = self._waiting.popleft()
            self._last.begin(self._edge)


class NcclIncoming:
    """Receives go to the device when they are asked for, which is when their header is there."""

    def __init__(self, edge: DeviceEdge) -> None:
        self._edge = edge

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._edge.stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        for tensor in tensors:
            self._edge.receive(as_bytes(tensor))
        return self._edge.stream.record()

    def advance(self) -> None:
        """Nothing waits for the host."""


def connect_edges(
    connections: Connections, place: Place, name: str
) -> dict[tuple[int, int], DeviceEdge]:
    """This rank's ends of all edges to its neighbours, by (source, target).

    Ranks meet in four rounds: forward edges from even stages, from odd ones, backward
    edges likewise. Each rank has at most one edge a round, so that no rank waits for a
    chain of others, however many stages there are. `name` tells links of the same ranks apart.
    """
    edges: dict[tuple[int, int], DeviceEdge] = {}
    for direction in Direction:
        for parity in (0, 1):
            for source, target in neighbours(place, direction):
                stage = place.grid.place(source).stage
                if stage % 2 == parity:
                    edges[source, target] = connections.edge(name, source, target)
    return edges


def neighbours(place: Place, direction: Direction) -> list[tuple[int, int]]:
    """The (source, target) of the edges in one direction at whose ends this rank is."""
    rank, step = place.rank, 1 if direction is Direction.FORWARD else -1
    before, after = rank - step, rank + step
    starts, ends = (place.is_first, place.is_last)[::step]
    return [(before, rank)] * (not starts) + [(rank, after)] * (not ends)
