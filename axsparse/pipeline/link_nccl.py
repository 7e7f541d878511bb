"""Contents of messages over NCCL: each direction of each pair of neighbours has its own queue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from axsparse.comm import Direction, Event
from axsparse.grid import Place
from axsparse.pipeline.wire import as_bytes
from axsparse.streams import Connections, Edge


class _Sent:
    """Between two events of the edge's stream."""

    def __init__(self, before: Event, after: Event) -> None:
        self._before = before
        self._after = after

    def begun(self) -> bool:
        return self._before.query()

    def done(self) -> bool:
        return self._after.query()


class NcclOutgoing:
    """Sends go to the device at once, in the order of the edge's stream."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def send(self, tensors: Sequence[Tensor], ready: Event) -> _Sent:
        stream = self._edge.stream
        stream.wait(ready)
        before = stream.record()
        for tensor in tensors:
            # As bytes: NCCL knows no int16. Its counts have 64 bits, so that nothing is split.
            self._edge.send(as_bytes(tensor))
        return _Sent(before, stream.record())

    def advance(self) -> None:
        """Nothing waits for the host."""

    def close(self) -> None:
        self._edge.close()


class NcclIncoming:
    """Receives go to the device when they are asked for, which is when their header is there."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._edge.stream.empty(shape, dtype)

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        for tensor in tensors:
            self._edge.receive(as_bytes(tensor))
        return self._edge.stream.record()

    def advance(self) -> None:
        """Nothing waits for the host."""

    def close(self) -> None:
        self._edge.close()


def connect_edges(connections: Connections, place: Place, name: str) -> dict[tuple[int, int], Edge]:
    """This rank's ends of all edges to its neighbours, by (source, target).

    Ranks meet in four rounds: forward edges from even stages, from odd ones, backward
    edges likewise. Each rank has at most one edge a round, so that no rank waits for a
    chain of others, however many stages there are. `name` tells links of the same ranks apart.
    """
    edges: dict[tuple[int, int], Edge] = {}
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
