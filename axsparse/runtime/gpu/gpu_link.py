"""The two ways in which a link moves the contents of tensors in GPU memory.

- `Nccl`: straight from GPU to GPU. Each direction between two neighbours has a separate peer
  connection, so that neither can hold up the other.
- `Staged`: through pinned memory of both hosts, which a GPU reaches without waiting, and over the
  channel between them.

Work of a GPU is enqueued on *streams*, CUDA's queues, and *events* say when it is complete. Since
the receiver asks for contents only once their header is there (`runtime/host_channel.py`), no GPU
waits in a receive through the whole forward of its neighbour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from axsparse.runtime.communication import Direction, Event
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.host_channel import Events, Way, as_bytes, neighbours

if TYPE_CHECKING:
    from axsparse.runtime.gpu.nccl import NcclConnections, NcclGroup


class Nccl:
    """A `Way` straight from GPU to GPU.

    A send spins on the device until its receive runs. If it were enqueued before its header has
    left, it could begin while the host is in a call that waits for all work of the device, such as
    the allocator's last resort or the loading of a kernel. The header would then never go, and both
    would wait for ever.
    """

    sends_in_turn = True
    """The host could not see when a send behind another begins on the device."""

    def __init__(self, connection: NcclGroup) -> None:
        self._connection = connection

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._connection.stream.empty(shape, dtype)

    def send(self, tensors: Sequence[Tensor]) -> Event:
        # NCCL knows no int16, so contents go as bytes; with 64-bit counts they need no cutting.
        return Events([self._connection.send(as_bytes(tensor)) for tensor in tensors])

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        return Events([self._connection.receive(as_bytes(tensor)) for tensor in tensors])

    def advance(self) -> None:
        """Do nothing, since nothing waits for the host."""


@dataclass
class StagedContents:
    """The contents of one message on their way into pinned memory, and then out of it."""

    first: Event
    """Completes when the contents are in pinned memory: copied there, or received."""
    begin_second: Callable[[], Event]
    """Moves the contents on from pinned memory, which this function keeps alive."""
    second: Event | None = None
    """Completes when they have left pinned memory; None until they begin to."""

    def query(self) -> bool:
        return self.second is not None and self.second.query()


class Staged:
    """A `Way` through pinned memory of the hosts.

    One end copies contents from the device to the host and sends them from there; the other
    receives them on the host and copies them to the device.
    """

    sends_in_turn = False

    def __init__(self, hosts: Way, device: Device) -> None:
        """`hosts` moves contents between the memory of the hosts."""
        self._hosts = hosts
        self._device = device
        self._stream = device.stream()
        self._under_way: deque[StagedContents] = deque()
        """Contents of which the second part has not begun."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.empty(shape, dtype)

    def send(self, tensors: Sequence[Tensor]) -> Event:
        pinned = self._pinned(tensors)
        for host, tensor in zip(pinned, tensors, strict=True):
            self._stream.copy(host, as_bytes(tensor))
        return self._begun(self._stream.record(), lambda: self._hosts.send(pinned))

    def receive(self, tensors: Sequence[Tensor]) -> Event:
        pinned = self._pinned(tensors)

        def to_the_device() -> Event:
            for host, tensor in zip(pinned, tensors, strict=True):
                self._stream.copy(as_bytes(tensor), host)
            return self._stream.record()

        return self._begun(self._hosts.receive(pinned), to_the_device)

    def advance(self) -> None:
        """Begin the second part of all contents whose first part is complete, in order."""
        while self._under_way and self._under_way[0].first.query():
            contents = self._under_way.popleft()
            contents.second = contents.begin_second()

    def _begun(self, first: Event, begin_second: Callable[[], Event]) -> Event:
        self._under_way.append(begun := StagedContents(first, begin_second))
        self.advance()
        return begun

    def _pinned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pinned memory for the bytes of each tensor; torch reuses it for later messages."""
        return [self._device.pinned(tensor.nbytes) for tensor in tensors]


def connect_peers(
    connections: NcclConnections, coords: RankCoords, name: str
) -> dict[tuple[int, int], NcclGroup]:
    """This rank's ends of all connections to its neighbours, by (source, target).

    The two ends of a connection wait for each other when they make it. Ranks go through four
    rounds: forward ones that start at even stages, forward ones that start at odd stages, and
    backward ones likewise. Each rank makes at most one a round, so that no rank waits for a chain
    of others, however many stages there are. `name` distinguishes links of the same ranks.
    """
    made: dict[tuple[int, int], NcclGroup] = {}
    for direction in Direction:
        for parity in (0, 1):
            for source, target in neighbours(coords, direction):
                stage = coords.grid.coords(source).stage
                if stage % 2 == parity:
                    made[source, target] = connections.peer(name, source, target)
    return made
