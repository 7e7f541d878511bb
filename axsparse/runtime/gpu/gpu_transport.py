"""The transport of ranks that have a GPU: headers and agreements between hosts, contents by NCCL,
by pinned memory of the hosts, or straight from GPU memory where MPI can read it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, Protocol

import torch
from torch import Tensor

from axsparse.runtime.communication import (
    Backoff,
    Collective,
    Direction,
    Link,
    Op,
    Transport,
    Work,
    wait,
)
from axsparse.runtime.gpu.device_protocol import Connections, Device, DeviceEdge
from axsparse.runtime.gpu.gpu_link import DeviceLink
from axsparse.runtime.gpu.lane import Incoming, Outgoing
from axsparse.runtime.gpu.nccl_collective import NcclCollective
from axsparse.runtime.gpu.nccl_lane import NcclIncoming, NcclOutgoing, connect_edges, neighbours
from axsparse.runtime.gpu.staged_collective import StagedCollective
from axsparse.runtime.gpu.staged_lane import (
    DirectIncoming,
    DirectOutgoing,
    StagedIncoming,
    StagedOutgoing,
)
from axsparse.runtime.grid import Place
from axsparse.runtime.wire import Wire

Staging = Literal["pinned", "direct"]


class Wires(Protocol):
    """What headers travel on, and contents that go by way of the hosts."""

    def wire(self, direction: Direction, source: int, target: int) -> Wire:
        """One end of a wire between neighbours."""
        ...

    def close(self) -> None:
        """Release them; their links are closed."""
        ...


class HostTransport(Transport, Protocol):
    """How the hosts of the ranks reach each other."""

    def wires(self) -> Wires:
        """New wires; all ranks call this together."""
        ...

    def branch(self) -> HostTransport:
        """Likewise, with wires."""
        ...


class _Closable(Protocol):
    def close(self) -> None: ...


class PushingBackoff:
    """Waits as another does, and moves on what only moves when the host looks.

    A header goes out after the GPU has come to its tensors. The rank may then wait in a
    collective for a neighbour who waits for that header.
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


class TwoWayCollective:
    """A group with a collective for host memory and one for that of the GPUs."""

    def __init__(self, hosts: Collective, devices: Collective, kind: str) -> None:
        """`kind`: the type of device whose buffers are `devices`' business."""
        self.rank = hosts.rank
        self.size = hosts.size
        self._hosts = hosts
        self._devices = devices
        self._kind = kind

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the transport for other members since the group was made."""
        return self._hosts.bytes_sent + self._devices.bytes_sent

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        here = buffer.device.type == self._kind
        return (self._devices if here else self._hosts).start(op, buffer, bounds)


class GpuTransport:
    """The ranks of a job whose tensors are in GPU memory."""

    def __init__(
        self,
        host: HostTransport,
        device: Device,
        *,
        connections: Connections | None,
        staging: Staging = "pinned",
    ) -> None:
        """`connections`: NCCL's; without them contents go by way of the hosts, as `staging`
        says. With NCCL active MPI carries host memory only, since both on one GPU may block
        each other."""
        assert connections is None or staging == "pinned"
        way = "nccl" if connections is not None else staging
        self.name = f"{way}, {host.name}"
        self.rank = host.rank
        self.size = host.size
        self._backoff = PushingBackoff(host.backoff)
        self.backoff: Backoff = self._backoff
        self.world: Collective = host.world
        self._host = host
        self._device = device
        self._connections = connections
        self._staging = staging
        self._made: list[_Closable] = []
        self._pushes: list[Callable[[], None]] = []
        # Branches share these: a name of NCCL's is used once.
        self._links = itertools.count()
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}

    def link(self, place: Place) -> Link:
        wires = self._host.wires()
        edges: dict[tuple[int, int], DeviceEdge] = {}
        if self._connections is not None:
            edges = connect_edges(self._connections, place, f"link {next(self._links)}")
        outgoing: dict[Direction, tuple[Wire, Outgoing]] = {}
        incoming: dict[Direction, tuple[Wire, Incoming]] = {}
        for direction in Direction:
            for source, target in neighbours(place, direction):
                wire, edge = wires.wire(direction, source, target), edges.get((source, target))
                if source == place.rank:
                    outgoing[direction] = wire, self._outgoing(wire, edge)
                else:
                    incoming[direction] = wire, self._incoming(wire, edge)
        link = DeviceLink(outgoing, incoming, self._device, self.backoff)
        self._push(link.push)
        # Closed from the last to the first: NCCL lets both ends of an edge wait for each other, so
        # that all ranks leave their edges in one order, as they came to them.
        self._made += [*edges.values(), wires, link]
        return link

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        hosts = self._host.collective(name, ranks)
        if len(ranks) == 1:
            return hosts  # nothing to be done, and no GPU memory for a communicator
        devices: NcclCollective | StagedCollective
        if self._connections is not None:
            key = name, tuple(ranks)
            number = self._groups[key] = self._groups.get(key, 0) + 1
            communicator = self._connections.communicator(f"{name} {number}", ranks)
            devices = NcclCollective(communicator, self._device, self.backoff)
        else:
            staged = self._host.collective(f"{name}, staged", ranks)
            devices = StagedCollective(staged, self._device, self.backoff)
            self._push(devices.advance)
        self._made.append(devices)
        return TwoWayCollective(hosts, devices, self._device.kind)

    def branch(self) -> GpuTransport:
        branch = copy.copy(self)
        branch._host = self._host.branch()
        branch._made, branch._pushes = [], []
        self._made.append(branch)
        return branch

    def abort(self, code: int) -> NoReturn:
        self._host.abort(code)

    def close(self) -> None:
        for made in reversed(self._made):
            made.close()
        self._made.clear()
        for push in self._pushes:
            self._backoff.pushes.remove(push)
        self._pushes.clear()
        # The first rank's process has what the groups met by, and may end now.
        here = torch.zeros(1, dtype=torch.float64)
        wait(self.world.start(Op.ALL_REDUCE, here), self.backoff)
        self._host.close()

    def _push(self, push: Callable[[], None]) -> None:
        """Call this whenever the rank waits, until what it is of is closed."""
        self._pushes.append(push)
        self._backoff.pushes.append(push)

    def _outgoing(self, wire: Wire, edge: DeviceEdge | None) -> Outgoing:
        if edge is not None:
            return NcclOutgoing(edge)
        if self._staging == "direct":
            return DirectOutgoing(wire)
        return StagedOutgoing(wire, self._device)

    def _incoming(self, wire: Wire, edge: DeviceEdge | None) -> Incoming:
        if edge is not None:
            return NcclIncoming(edge)
        if self._staging == "direct":
            return DirectIncoming(wire, self._device)
        return StagedIncoming(wire, self._device)
