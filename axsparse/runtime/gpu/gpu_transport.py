"""The transport of ranks that have a GPU, and the two ways in which its links move contents.

- `Nccl`: straight from GPU to GPU. Each direction between two neighbours has a separate peer
  connection, so that neither can hold up the other.
- `Staged`: through pinned memory of both hosts, which a GPU reaches without waiting, and over the
  channel between them.

Work of a GPU is enqueued on *streams*, CUDA's queues, and *events* say when it is complete. Since
the receiver asks for contents only once their header is there (`runtime/host_channel.py`), no GPU
waits in a receive through the whole forward of its neighbour.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Closable, Collective, Direction, Event, Link
from axsparse.runtime.exchange import sum_of
from axsparse.runtime.gpu.collectives import NcclCollective, StagedCollective, TwoWayCollective
from axsparse.runtime.gpu.device import Device
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.host_channel import (
    ChannelLink,
    Direct,
    Events,
    HostChannel,
    Way,
    as_bytes,
    neighbours,
)
from axsparse.runtime.mpi.mpi_transport import MpiTransport

if TYPE_CHECKING:
    from axsparse.runtime.gpu.nccl import NcclConnections, NcclGroup


class PushingBackoff:
    """Waits as another back-off does, and meanwhile looks after transfers that need the host.

    A header is sent once the GPU has made its tensors. By then the rank may wait in a collective
    for a neighbour that waits for that header.
    """

    def __init__(self, inner: Backoff) -> None:
        self.pauses = 0
        self.pushes: list[Callable[[], None]] = []
        self._inner = inner

    def pause(self) -> None:
        for push in self.pushes:
            push()
        self._inner.pause()
        self.pauses = self._inner.pauses

    def reset(self) -> None:
        self._inner.reset()


class GpuTransport:
    """The ranks of a job whose tensors are in GPU memory."""

    def __init__(
        self, host: MpiTransport, device: Device, *, connections: NcclConnections | None
    ) -> None:
        """Contents travel over NCCL's `connections`, or without any through pinned memory. MPI
        carries host memory only, since NCCL and MPI on one GPU may block each other."""
        self.name = f"{'pinned' if connections is None else 'nccl'}, {host.name}"
        self.rank = host.rank
        self.size = host.size
        self._backoff = PushingBackoff(host.backoff)
        self.backoff: Backoff = self._backoff
        self.world: Collective = host.world
        self._host = host
        self._device = device
        self._connections = connections
        self._made: list[Closable] = []
        self._communicators: dict[tuple[int, ...], NcclGroup] = {}
        self._pushes: list[Callable[[], None]] = []
        # These number links and groups, since NCCL needs new names; branches share the counts.
        self._links = itertools.count()
        self._groups: dict[tuple[int, ...], int] = {}

    def link(self, coords: RankCoords) -> Link:
        channels = self._host.channels()
        connections: dict[tuple[int, int], NcclGroup] = {}
        if self._connections is not None:
            connections = connect_peers(self._connections, coords, f"link {next(self._links)}")

        def ends(direction: Direction, source: int, target: int) -> tuple[HostChannel, Way]:
            channel = channels.channel(direction, source, target)
            if connections:
                return channel, Nccl(connections[source, target])
            return channel, Staged(Direct(channel), self._device)

        link = ChannelLink(coords, ends, self.backoff, ready=lambda: self._device.compute.record())
        self._push_while_waiting(link.push)
        # The link is closed first and the connections last, from the last made to the first. Both
        # ends of a connection wait for each other in NCCL, so that all ranks have to close theirs
        # in one order, as they made them.
        self._made += [*connections.values(), channels, link]
        return link

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        hosts = self._host.collective(name, ranks)
        if len(ranks) == 1:
            return hosts  # a group of one exchanges nothing and needs no communicator on the GPU
        devices: NcclCollective | StagedCollective
        if self._connections is not None:
            communicator = self._communicator(self._connections, name, tuple(ranks))
            devices = NcclCollective(communicator, self._device, self.backoff)
        else:
            staged = self._host.collective(f"{name}, staged", ranks)
            devices = StagedCollective(staged, self._device, self.backoff)
        self._push_while_waiting(devices.advance)
        self._made.append(devices)
        return TwoWayCollective(hosts, devices, self._device.kind)

    def branch(self) -> GpuTransport:
        branch = copy.copy(self)
        branch._host = self._host.branch()
        branch._made, branch._pushes, branch._communicators = [], [], {}
        self._made.append(branch)
        return branch

    def abort(self, code: int) -> NoReturn:
        self._host.abort(code)

    def close(self) -> None:
        for each in reversed(self._made):
            each.close()
        self._made.clear()
        self._communicators.clear()
        for push in self._pushes:
            self._backoff.pushes.remove(push)
        self._pushes.clear()
        # The first rank's process holds the store by which groups meet, and may end after this.
        sum_of(self, [0.0])
        self._host.close()

    def _communicator(
        self, connections: NcclConnections, name: str, ranks: tuple[int, ...]
    ) -> NcclGroup:
        """The communicator of these ranks, which has the name of their first group. All their
        groups share it, since each communicator takes memory of the GPU."""
        communicator = self._communicators.get(ranks)
        if communicator is None:
            number = self._groups[ranks] = self._groups.get(ranks, 0) + 1
            communicator = connections.communicator(f"{name} {number}", ranks)
            self._communicators[ranks] = communicator
            self._made.append(communicator)
        return communicator

    def _push_while_waiting(self, push: Callable[[], None]) -> None:
        """Have `push` called whenever the rank waits, until this transport is closed."""
        self._pushes.append(push)
        self._backoff.pushes.append(push)


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
    """A `Way` through pinned memory of the hosts: contents are copied there from the device and
    sent, and at the other end received there and copied to the device."""

    sends_in_turn = False

    def __init__(self, hosts: Way, device: Device) -> None:
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
