"""HostChannels, peers and communicators between stand-in devices, and a transport made of them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from support.standin_device import (
    POISON,
    Flag,
    Hardware,
    MisuseError,
    Operation,
    Queue,
    Span,
    StandInDevice,
    StandInStream,
)
from torch import Tensor

from axsparse.runtime.communication import Direction
from axsparse.runtime.gpu.gpu_transport import GpuTransport
from axsparse.runtime.host_channel import Header
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.rank_order import sum_in_rank_order

T = TypeVar("T")
Way = Literal["nccl", "pinned"]
WAYS: tuple[Way, ...] = ("nccl", "pinned")


class StandInChannel:
    """A `HostChannel`: both sequences of both ends are separate queues, so that anything may be
    late; memory is read and written when an operation runs, not when it is asked for."""

    def __init__(self, device: StandInDevice, source: int, target: int, name: str) -> None:
        self._device = device
        self._receives = device.rank == target
        self._headers: deque[Header] = _shared(device, ("headers", name, source, target), deque)
        self._contents: deque[Tensor] = _shared(device, ("channel", name, source, target), deque)
        self._header_queue = Queue(device, f"headers of {name}")
        self._queue = Queue(device, f"channel of {name}")

    def send_header(self, header: Header) -> Flag:
        return self._header_queue.enqueue(
            Operation("a header", lambda: self._headers.append(header.copy()))
        )

    def receive_header(self) -> Header | None:
        self._device.hardware.tick()
        return self._headers.popleft() if self._headers else None

    def send(self, piece: Tensor) -> Flag:
        span, what = Span(piece), "a send of the channel"

        def run() -> None:
            self._contents.append(span.bytes(what).clone())

        return self._queue.enqueue(Operation(what, run, reads=[span]))

    def receive(self, piece: Tensor) -> Flag:
        span, what = Span(piece), "a receive of the channel"

        def run() -> None:
            content, memory = self._contents.popleft(), span.bytes(what)
            if content.shape != memory.shape:
                raise MisuseError(f"{what}: {len(memory)} bytes for {len(content)} that were sent")
            memory.copy_(content)

        return self._queue.enqueue(
            Operation(what, run, lambda: bool(self._contents), writes=[span])
        )

    def check_that_it_is_empty(self) -> None:
        assert not self._queue.pending and not self._header_queue.pending
        left = self._receives and (self._headers or self._contents)
        assert not left, "something was left on the way"


@dataclass
class _Cable:
    """The shared state of the two ends of a peer connection."""

    sends: deque[tuple[Operation, Span]] = field(default_factory=deque)
    asked: int = 0
    """Receives that have not run."""


class StandInPeer:
    """An `PeerConnection`: a send holds its queue until its receive runs, and both end together."""

    def __init__(self, device: StandInDevice, name: str, source: int, target: int) -> None:
        self.stream = StandInStream(device, name)
        self._name = name
        self._device = device
        self._ends = source, target
        self._sends = device.rank == source
        self._cable: _Cable = _shared(device, ("peer", name, source, target), _Cable)

    def send(self, content: Tensor) -> Flag:
        if not self._sends:
            raise MisuseError(f"{self._name}: a send at its receiving end")
        span = Span(content)
        operation = Operation("a send of NCCL", lambda: None, lambda: False, reads=[span])
        self._cable.sends.append((operation, span))
        flag = self.stream.queue.enqueue(operation)
        if self._cable.asked >= len(self._cable.sends):
            self._check_that_it_can_run()
        return flag

    def receive(self, content: Tensor) -> Flag:
        if self._sends:
            raise MisuseError(f"{self._name}: a receive at its sending end")
        self._check_that_it_need_not_spin()
        self._cable.asked += 1
        span, what = Span(content), "a receive of NCCL"

        def run() -> None:
            send, source = self._cable.sends.popleft()
            self._cable.asked -= 1
            data, memory = source.bytes(send.what), span.bytes(what)
            if data.shape != memory.shape:
                raise MisuseError(f"{what}: {len(memory)} bytes for {len(data)} that were sent")
            memory.copy_(data)
            send.queue.leave(send)

        def may_run() -> bool:
            return bool(self._cable.sends) and _is_head(self._cable.sends[0][0])

        return self.stream.queue.enqueue(Operation(what, run, may_run, writes=[span]))

    def close(self) -> None:
        assert not self.stream.queue.pending or not self._cable.sends, "closed under way"
        closed: list[tuple[int, int]] = _shared(self._device, ("closed", self._device.rank), list)
        closed.append(self._ends)

    def _check_that_it_need_not_spin(self) -> None:
        """Everything in front of the send must be sends that are asked for already. A send that is
        yet to come is looked at when it does."""
        sends = [operation for operation, _ in self._cable.sends]
        if len(sends) <= self._cable.asked:
            return
        wanted = sends[self._cable.asked]
        for operation in wanted.queue.pending:
            if operation is wanted:
                return
            if operation not in sends[: self._cable.asked]:
                raise MisuseError(f"{self._name}: a receive that spins until {operation.what} ran")

    def _check_that_it_can_run(self) -> None:
        """A send whose receive spins already must wait for nothing but sends."""
        sends = [operation for operation, _ in self._cable.sends]
        late = [other for other in self.stream.queue.pending if other not in sends]
        if late:
            raise MisuseError(f"{self._name}: a receive that spins until {late[0].what} ran")


def _is_head(operation: Operation) -> bool:
    pending = operation.queue.pending
    return bool(pending) and pending[0] is operation


@dataclass
class _Round:
    """One operation of a communicator: the input of each rank."""

    kind: tuple[object, ...]
    posted: dict[int, tuple[Operation, Span]] = field(default_factory=dict)
    before: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)


NCCL_TYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
}
"""The types that torch can pass to NCCL."""


class StandInCommunicator:
    """A `Communicator` that adds in rank order; no operation runs before all ranks have it at the
    head of their queues. Ranks that differ in operation, or in its order among the operations of
    other communicators that they share, are found out."""

    def __init__(self, device: StandInDevice, name: str, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(device.rank)
        self.size = len(ranks)
        self.stream = StandInStream(device, name)
        self._device = device
        self._name = name
        self._ranks = tuple(ranks)
        self._rounds: dict[int, _Round] = _shared(device, ("communicator", name, self._ranks), dict)
        self._count = 0
        self._all: dict[tuple[str, tuple[int, ...]], StandInCommunicator]
        self._all = _shared(device, ("all", device.rank), dict)
        self._all[name, self._ranks] = self

    def all_reduce(self, buffer: Tensor) -> Flag:
        def run(buffers: list[Tensor]) -> None:
            total = sum_in_rank_order(buffers)
            for one in buffers:
                one.copy_(total)

        return self._enqueue("all_reduce", buffer, run)

    def broadcast(self, buffer: Tensor) -> Flag:
        def run(buffers: list[Tensor]) -> None:
            for one in buffers:
                one.copy_(buffers[0])

        return self._enqueue("broadcast", buffer, run)

    def reduce_scatter(self, buffer: Tensor, bounds: Sequence[int]) -> Flag:
        def run(buffers: list[Tensor]) -> None:
            total = sum_in_rank_order(buffers)
            for one, shard in zip(buffers, itertools.starmap(slice, pairwise(bounds)), strict=True):
                one.view(torch.uint8).fill_(POISON)
                one[shard] = total[shard]

        return self._enqueue("reduce_scatter", buffer, run, bounds)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> Flag:
        def run(buffers: list[Tensor]) -> None:
            shards = itertools.starmap(slice, pairwise(bounds))
            total = torch.cat([one[shard] for one, shard in zip(buffers, shards, strict=True)])
            for one in buffers:
                one.copy_(total)

        return self._enqueue("all_gather", buffer, run, bounds)

    def close(self) -> None:
        assert not self.stream.queue.pending, "closed under way"

    def _enqueue(
        self,
        what: str,
        buffer: Tensor,
        run: Callable[[list[Tensor]], None],
        bounds: Sequence[int] = (),
    ) -> Flag:
        if buffer.dtype not in NCCL_TYPES:
            raise MisuseError(f"{self._name}: NCCL knows no {buffer.dtype}")
        number = self._count
        self._count += 1
        kind = (what, buffer.dtype, buffer.numel(), *bounds)
        this = self._rounds.setdefault(number, _Round(kind, before=self._order()))
        if this.kind != kind:
            raise MisuseError(f"{self._name}: members disagree: {this.kind} and {kind}")
        self._check_order(this.before)
        span, dtype = Span(buffer), buffer.dtype

        def run_all() -> None:
            posted = [this.posted[rank] for rank in range(self.size)]
            run([memory.bytes(what).view(dtype) for _, memory in posted])
            for rank, (operation, _) in enumerate(posted):
                if rank != self.rank:
                    operation.queue.leave(operation)
            del self._rounds[number]

        def may_run() -> bool:
            return len(this.posted) == self.size and all(
                _is_head(operation) for operation, _ in this.posted.values()
            )

        operation = Operation(f"{what} of NCCL", run_all, may_run, reads=[span], writes=[span])
        this.posted[self.rank] = (operation, span)
        return self.stream.queue.enqueue(operation)

    def _order(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """How many operations this rank has begun on each communicator."""
        return {key: other._count for key, other in self._all.items()}

    def _check_order(self, before: dict[tuple[str, tuple[int, ...]], int]) -> None:
        """Of communicators that this rank shares with the one that began the operation."""
        for key, count in self._order().items():
            if key != (self._name, self._ranks) and before.get(key, count) != count:
                raise MisuseError(f"{self._name}: members differ in its order with {key[0]}")


class StandInConnections:
    """`Connections` that are there at once; a name that this rank has used before is refused."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._names: set[tuple[object, ...]] = set()

    def peer(self, name: str, source: int, target: int) -> StandInPeer:
        self._take(name, source, target)
        return StandInPeer(self._device, name, source, target)

    def communicator(self, name: str, ranks: Sequence[int]) -> StandInCommunicator:
        self._take(name, *ranks)
        return StandInCommunicator(self._device, name, ranks)

    def _take(self, *name: object) -> None:
        if name in self._names:
            raise MisuseError(f"{name} would meet the ends of another of this name")
        self._names.add(name)


class StandInHost(LocalTransport):
    """Ranks that take turns, with channels between them."""

    def __init__(self, world: LocalWorld[Any], device: StandInDevice) -> None:
        super().__init__(world, device.rank)
        self._device = device
        self._channels = 0

    def channels(self) -> StandInChannels:
        self._channels += 1
        return StandInChannels(self._device, f"channels {self._channels}")


class StandInChannels:
    """HostChannels between hosts."""

    def __init__(self, device: StandInDevice, name: str) -> None:
        self._device = device
        self._name = name
        self._made: list[StandInChannel] = []

    def channel(self, direction: Direction, source: int, target: int) -> StandInChannel:
        self._made.append(
            StandInChannel(self._device, source, target, f"{self._name} {direction.name}")
        )
        return self._made[-1]

    def close(self) -> None:
        for channel in self._made:
            channel.check_that_it_is_empty()


class StandIn(GpuTransport):
    """The GPU transport itself, over devices, channels and connections that are none."""

    def __init__(
        self,
        hardware: Hardware,
        rank: int,
        way: Way,
        device: Callable[[Hardware, int], StandInDevice] = StandInDevice,
    ) -> None:
        self.device = device(hardware, rank)
        host = StandInHost(hardware.world, self.device)
        connections = StandInConnections(self.device) if way == "nccl" else None
        super().__init__(host, self.device, connections=connections)


def _shared(device: StandInDevice, key: object, make: Callable[[], T]) -> T:
    """The shared state of the ends of a connection."""
    found: T = device.hardware.shared.setdefault(key, make())  # type: ignore[assignment]
    return found


def on_standins(
    ranks: int,
    way: Way,
    main: Callable[[Any], T],
    *,
    seed: int,
    make: Callable[..., StandIn] = StandIn,
) -> list[T]:
    """Call `main` on every rank with its transport, which is closed then; all that it returns.

    No operation may be under way afterwards. `make` is the class of the transports.
    """
    world: LocalWorld[T] = LocalWorld(ranks, seed=seed)
    hardware = Hardware(world, seed)

    def body(rank: int) -> T:
        transport = make(hardware, rank, way)
        result = main(transport)
        transport.close()
        return result

    results = world.run(body)
    assert not any(queue.pending for queue in hardware.queues)
    return results
