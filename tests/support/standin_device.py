"""GPUs, NCCL and the channels between hosts without any of them: queues that finish late.

All queues of all ranks run in one `Hardware`, a few operations at every question that a
host asks, drawn at random: in order within a queue, in any order between queues. Memory
is the CPU's, filled with `POISON` until something is written to it.

What would go wrong on a GPU now and then goes wrong here always. Two operations that
touch the same bytes, one of them writing, must be in an order that the host has made
sure of: the same queue, a `wait`, or an event that the host has seen complete. This is
checked when the second one is enqueued, by vector clocks, whatever the draw.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from axsparse.runtime.communication import Event
from axsparse.runtime.gpu.device_protocol import Mark
from axsparse.runtime.host_channel import as_bytes
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.seeds import kept_rng

HOST = torch.device("cpu")
POISON = 0xA5
MOMENTS = (0, 1, 2, 3, 15)
"""How many operations may run between two questions of a host."""
ZERO = 1e6
"""The time of a device's clock when its host's begins."""
Completed = dict[int, int]
"""Queue → how many of its operations are known to have completed."""


class MisuseError(AssertionError):
    """A misuse that would give wrong results or a deadlock on a GPU, NCCL or MPI."""


class Span:
    """Some bytes in memory, which whoever asked for the operation has to keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.storage = weakref.ref(tensor.untyped_storage())
        self.start = tensor.storage_offset() * tensor.itemsize
        self.stop = self.start + tensor.nbytes

    def bytes(self, what: str) -> Tensor:
        """The memory itself."""
        storage = self.storage()
        if storage is None:
            raise MisuseError(f"{what}: its memory was freed while the device still needed it")
        size = self.stop - self.start
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.start, (size,), (1,))

    def overlaps(self, other: Span) -> bool:
        same = self.storage() is other.storage() is not None
        return same and self.start < other.stop and other.start < self.stop


@dataclass
class Operation:
    """Something on a queue."""

    what: str
    run: Callable[[], None]
    may_run: Callable[[], bool] = lambda: True
    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()
    queue: Queue = field(init=False)
    number: int = field(init=False)
    clock: Completed = field(init=False)
    done: bool = False


@dataclass
class Flag:
    """The end of an operation, for the host to ask after."""

    device: StandInDevice
    operation: Operation

    def query(self) -> bool:
        self.device.hardware.tick()
        if self.operation.done:
            merge(self.device.known, self.operation.clock)
        return self.operation.done


class StandInMark:
    """A `Mark` whose time is known when it is set, and reported once its operation has run."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._flag: Flag | None = None
        self._time = 0.0

    def set(self) -> None:
        self._flag = self._device.compute.queue.enqueue(Operation("a mark", lambda: None))
        self._time = self._device.reached

    def wait(self) -> None:
        assert self._flag is not None
        while not self._flag.query():
            if self._device.hardware.frozen:
                raise MisuseError("the host waits for a device that stands still")
        self._device.now = max(self._device.now, self._time - ZERO)

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, StandInMark)
        for mark in (earlier, self):
            if mark._flag is None or not mark._flag.operation.done:
                raise MisuseError("the time of a mark that has not been reached")
        return self._time - earlier._time


class Hardware:
    """All queues there are."""

    def __init__(self, world: LocalWorld[Any], seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)  # noqa: S311 - test order
        self.queues: list[Queue] = []
        self.shared: dict[object, object] = {}
        """The state that ends of one connection share."""
        self.frozen = False
        """Whether time passes in `finish` only."""

    def tick(self) -> None:
        """A moment passes."""
        for _ in [] if self.frozen else range(self.random.choice(MOMENTS)):
            able = [queue for queue in self.queues if queue.able]
            queue = self.random.choice(able) if able else None
            if queue is not None and (queue.chance == 1 or self.random.random() < queue.chance):
                queue.run_head()

    def finish(self, but: Queue | None = None) -> None:
        """Let everything that can run do so, one queue excepted."""
        while able := [queue for queue in self.queues if queue.able and queue is not but]:
            able[0].run_head()


class Queue:
    """Operations in order."""

    def __init__(self, device: StandInDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.chance = 0.1 if device.hardware.random.random() < 0.3 else 1.0
        """How often it runs when it is drawn: some queues are slow."""
        self.pending: deque[Operation] = deque()
        self.number = len(device.hardware.queues)
        self._issued = 0
        self._clock: Completed = {}
        device.hardware.queues.append(self)

    @property
    def able(self) -> bool:
        return bool(self.pending) and self.pending[0].may_run()

    def enqueue(self, operation: Operation) -> Flag:
        """Add an operation; MisuseError if it races with an earlier one."""
        self._issued += 1
        merge(self._clock, self.device.known)
        self.device.check(operation, self._clock)
        self._clock[self.number] = self._issued
        operation.queue, operation.number = self, self._issued
        operation.clock = dict(self._clock)
        self.pending.append(operation)
        return Flag(self.device, operation)

    def after(self, clock: Completed) -> None:
        """Order all operations enqueued from now on after the ones that this clock knows of."""
        merge(self._clock, clock)

    def run_head(self) -> None:
        operation = self.pending[0]
        operation.run()
        self.leave(operation)

    def leave(self, operation: Operation) -> None:
        """The head has completed."""
        assert self.pending.popleft() is operation
        operation.done = True
        self.device.hardware.world.progress()


class StandInStream:
    """A `Stream` on a queue."""

    def __init__(self, device: StandInDevice, name: str) -> None:
        self.queue = Queue(device, name)

    def record(self) -> Flag:
        return self.queue.enqueue(Operation("an event", lambda: None))

    def wait(self, event: Event) -> None:
        assert isinstance(event, Flag) and event.device is self.queue.device
        self.queue.enqueue(Operation("a wait", lambda: None, lambda: event.operation.done))
        self.queue.after(event.operation.clock)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        what = f"a copy on {self.queue.name}"
        to, out = Span(target), Span(source)

        def run() -> None:
            to.bytes(what).copy_(out.bytes(what))

        self.queue.enqueue(Operation(what, run, reads=[out], writes=[to]))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.queue.device.memory)
        as_bytes(tensor).fill_(POISON)
        return tensor


class StandInDevice:
    """The `Device` of one rank, and what its host knows to be complete."""

    def __init__(self, hardware: Hardware, rank: int, memory: torch.device = HOST) -> None:
        self.memory, self.kind = memory, memory.type
        self.hardware = hardware
        self.rank = rank
        self.known: Completed = {}
        self._touched: list[tuple[Span, bool, Operation]] = []
        self.compute = StandInStream(self, f"the compute stream of rank {rank}")
        self._streams = 0
        self.now = 0.0
        """The time of the host's clock; moves on request."""
        self._busy_until = 0.0
        self.marks = 0
        """Marks made."""

    def stream(self) -> StandInStream:
        self._streams += 1
        return StandInStream(self, f"stream {self._streams} of rank {self.rank}")

    def pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def mark(self) -> StandInMark:
        self.marks += 1
        return StandInMark(self)

    def work(self, seconds: float) -> None:
        """Enqueue what keeps compute busy for a while."""
        self._busy_until = max(self.now, self._busy_until) + seconds
        self.compute.queue.enqueue(Operation("work", lambda: None))

    @property
    def reached(self) -> float:
        """When compute will have run all that it has, by its own clock."""
        return ZERO + max(self.now, self._busy_until)

    def later(self, wanted: Tensor) -> Tensor:
        """A tensor that compute fills some time; poison until then."""
        tensor = self.compute.empty(wanted.shape, wanted.dtype)
        content, to = as_bytes(wanted.contiguous()).clone(), Span(tensor)

        def run() -> None:
            to.bytes("compute").copy_(content)

        self.compute.queue.enqueue(Operation("compute", run, writes=[to]))
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        """The values that compute finds in a tensor, read some time from now and waited for."""
        found = torch.empty_like(tensor)
        out, to = Span(tensor), as_bytes(found)

        def run() -> None:
            to.copy_(out.bytes("compute"))

        flag = self.compute.queue.enqueue(Operation("compute", run, reads=[out]))
        while not flag.query():
            pass
        return found

    def check(self, operation: Operation, clock: Completed) -> None:
        """MisuseError if an operation after `clock` may run together with one that it needs to
        come after; from now on, later ones are checked against it."""
        self._touched = [
            entry
            for entry in self._touched
            if entry[0].storage() is not None and not _knows(self.known, entry[2])
        ]
        spans = [(span, False) for span in operation.reads]
        spans += [(span, True) for span in operation.writes]
        for span, writes in spans:
            for other, written, earlier in self._touched:
                if (writes or written) and span.overlaps(other) and not _knows(clock, earlier):
                    raise MisuseError(
                        f"{operation.what} {'writes' if writes else 'reads'} what {earlier.what} "
                        f"{'writes' if written else 'reads'}, which may not have run by then"
                    )
        self._touched += [(span, writes, operation) for span, writes in spans]


class HoldingStream(StandInStream):
    """A compute stream whose work runs when it is called. A host that gives it work while it waits
    for other devices stands still meanwhile, and neither sends nor takes anything: so does one that
    asks a GPU for a number."""

    def wait(self, event: Event) -> None:
        device = self.queue.device
        with kept_rng():
            while not event.query():
                device.hardware.world.pass_turn(device.rank)


class HoldingDevice(StandInDevice):
    """A device whose compute runs when it is called; all other streams are late."""

    def __init__(self, hardware: Hardware, rank: int, memory: torch.device) -> None:
        super().__init__(hardware, rank, memory)
        self.compute = HoldingStream(self, f"the compute stream of rank {rank}")


def merge(clock: Completed, other: Completed) -> None:
    """Know what the other knows."""
    for queue, number in other.items():
        clock[queue] = max(clock.get(queue, 0), number)


def _knows(clock: Completed, operation: Operation) -> bool:
    return clock.get(operation.queue.number, 0) >= operation.number


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
