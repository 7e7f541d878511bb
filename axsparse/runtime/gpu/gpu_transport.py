"""The transport of ranks that have a GPU.

Headers and agreements travel between the hosts. Contents travel over NCCL, or through pinned memory
of the hosts; `gpu_link.py` explains the parts.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from axsparse.runtime.communication import (
    Backoff,
    Closable,
    Collective,
    Direction,
    Link,
)
from axsparse.runtime.exchange import sum_of
from axsparse.runtime.gpu.collectives import NcclCollective, StagedCollective, TwoWayCollective
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.gpu.gpu_link import Nccl, Staged, connect_peers
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.host_channel import ChannelLink, Direct, HostChannel, Way
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
        """Called in every pause."""
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
        """Contents travel over NCCL's `connections`, or without any through pinned memory.

        MPI carries host memory only, since NCCL and MPI on one GPU may block each other.
        """
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
