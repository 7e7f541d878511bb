"""A `Collective` over NCCL, which exchanges and adds compressed gradients in GPU memory.

An operation is enqueued at once, behind the compute that makes its buffer and behind
earlier operations of the same group; the host only asks whether it has run. Every member
starts its operations in one order (`data_parallel/gradient_sync.py` sees to that), so nothing
that becomes ready early on one GPU can hold up another.

NCCL adds in an order of its own, so its sums equal those of other transports only within a
tolerance. bf16 and fp16 travel and are added in their own precision.

NCCL's reduce-scatter and all-gather take equal shards only. Unequal ones would be a reduce or a
broadcast for each member, one behind the other: with 64 members 64 calls a bucket, each as slow as
its latency. Instead they are copied into a buffer in which every shard has the room of the largest,
and one call exchanges that. Shares of sharded state differ by a block or two (`samo/shards.py`), so
the buffer is hardly larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from axsparse.runtime.communication import (
    Backoff,
    Closable,
    Event,
    Exchange,
    Op,
    shard_bounds,
    wait_for,
)
from axsparse.runtime.gpu.device_protocol import Communicator, Connections, Device, Stream
from axsparse.runtime.rank_order import exchanged_bytes

SMALLER = 8
"""When a group connects, it tries ever smaller buffers, each smaller by this factor."""
MOST_PADDING = 2
"""Shards are padded if that makes the buffer less than this many times as large; otherwise, as if
one member had all of it, they travel one by one."""
TRIED = Exchange(Op.ALL_REDUCE, torch.bfloat16, 1 << 23)
"""A sum as large as those of gradients: NCCL takes memory for each of its algorithms, by size."""


class NcclWork:
    """An operation under way, which keeps its buffer alive."""

    def __init__(self, buffer: Tensor, calls: list[Event]) -> None:
        self._buffer = buffer
        self._calls = calls
        """The calls that have not run yet, in order."""

    def poll(self) -> bool:
        while self._calls and self._calls[0].query():
            self._calls.pop(0)
        return not self._calls

    def query(self) -> bool:
        return self.poll()


class NcclCollective:
    """Operations over the members of one communicator, on buffers in GPU memory.

    Several of them may share a communicator, since members start the operations of all groups in
    one order.
    """

    def __init__(self, communicator: Communicator, device: Device, backoff: Backoff) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.bytes_sent = 0
        self._communicator = communicator
        self._device = device
        self._backoff = backoff
        self._copies: Stream | None = None
        """The stream for the copies of padded shards; made when it is first needed."""
        self._last: NcclWork | PaddedWork | None = None

    def start(
        self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None
    ) -> NcclWork | PaddedWork:
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        self._last = self._begun(op, buffer, limits)
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        return self._last

    def warm_up(self, planned: Sequence[Exchange]) -> None:
        """Carry out the planned operations, also on ever smaller buffers; all members call this.

        NCCL chooses its algorithm by operation and size, and connects each at its first use. That
        holds up the host and takes memory of the GPU, of which torch may leave none later.
        """
        for one in planned:
            buffer = self._device.compute.empty((one.numel,), one.dtype)
            numel, bounds = one.numel, list(one.bounds or shard_bounds(one.numel, self.size))
            while numel:
                wait_for(self._begun(one.op, buffer[:numel], bounds), self._backoff)
                numel //= SMALLER
                bounds = shard_bounds(numel, self.size)

    def close(self) -> None:
        """Wait for what is under way; whoever made the communicator closes it."""
        if self._last is not None:
            wait_for(self._last, self._backoff)

    def _begun(self, op: Op, buffer: Tensor, bounds: list[int]) -> NcclWork | PaddedWork:
        """An operation that runs once compute has made its buffer."""
        if self.size == 1 or not buffer.numel():
            return NcclWork(buffer, [])
        if is_worth_padding(op, bounds):
            shards = PaddedShards(op, buffer, bounds, self.rank)
            padded = shards.filled(self._device)
            equal = shard_bounds(padded.numel(), self.size)
            if self._copies is None:
                self._copies = self._device.stream()
            return PaddedWork(self._begun(op, padded, equal), shards, self._copies)
        self._communicator.stream.wait(self._device.compute.record())
        return NcclWork(buffer, list(self._calls(op, buffer, bounds)))

    def _calls(self, op: Op, buffer: Tensor, bounds: list[int]) -> Iterator[Event]:
        """Enqueue an operation as one or more calls of the communicator."""
        communicator = self._communicator
        if op in (Op.BROADCAST, Op.ALL_GATHER):
            # NCCL knows no int16, so buffers whose values are not added go as bytes.
            bounds = [bound * buffer.itemsize for bound in bounds]
            buffer = buffer.view(torch.uint8)
        if op is Op.ALL_REDUCE:
            yield communicator.all_reduce(buffer)
        elif op is Op.BROADCAST:
            yield communicator.broadcast(buffer, 0)
        elif len({stop - start for start, stop in itertools.pairwise(bounds)}) == 1:
            own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
            if op is Op.REDUCE_SCATTER:
                yield communicator.reduce_scatter(own, buffer)
            else:
                yield communicator.all_gather(buffer, own)
        else:
            # The shards are so unequal that padding would cost more, as if one member had all.
            for root, (start, stop) in enumerate(itertools.pairwise(bounds)):
                if start < stop and op is Op.REDUCE_SCATTER:
                    yield communicator.reduce(buffer[start:stop], root)
                elif start < stop:
                    yield communicator.broadcast(buffer[start:stop], root)


class _Work(Protocol):
    def poll(self) -> bool: ...


def is_worth_padding(op: Op, bounds: Sequence[int]) -> bool:
    """Whether an operation on these shards is better carried out on padded ones."""
    if op not in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
        return False
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    return len(set(sizes)) > 1 and len(sizes) * max(sizes) < MOST_PADDING * sum(sizes)


class PaddedShards:
    """A buffer's shards in room of equal size."""

    def __init__(self, op: Op, buffer: Tensor, bounds: Sequence[int], rank: int) -> None:
        """`rank` is this member's number."""
        self._op = op
        self._rank = rank
        self._own = [buffer[start:stop] for start, stop in itertools.pairwise(bounds)]
        self._width = max(shard.numel() for shard in self._own)

    def filled(self, device: Device) -> Tensor:
        """The padded buffer, into which compute copies what this member gives to the exchange."""
        shape, dtype = (len(self._own) * self._width,), self._own[0].dtype
        self._padded = device.compute.empty(shape, dtype)
        gives = range(len(self._own)) if self._op is Op.REDUCE_SCATTER else [self._rank]
        rooms = [self._room(member) for member in gives]
        device.compute.copy_all(rooms, [self._own[member] for member in gives])
        return self._padded

    def take_back(self, stream: Stream) -> Event:
        """Copy back what this member got from the exchange, which has run."""
        gets = [self._rank]
        if self._op is Op.ALL_GATHER:
            gets = [member for member in range(len(self._own)) if member != self._rank]
        stream.copy_all(
            [self._own[member] for member in gets], [self._room(member) for member in gets]
        )
        return stream.record()

    def _room(self, member: int) -> Tensor:
        begin = member * self._width
        return self._padded[begin : begin + self._own[member].numel()]


class PaddedWork:
    """An exchange of padded shards under way."""

    def __init__(self, work: _Work, shards: PaddedShards, stream: Stream) -> None:
        """`stream` is for copies, so that they wait neither for compute nor for later exchanges."""
        self._work = work
        self._shards: PaddedShards | None = shards
        self._stream = stream
        self._copied: Event | None = None

    def poll(self) -> bool:
        if self._copied is None and self._shards is not None and self._work.poll():
            self._copied = self._shards.take_back(self._stream)
        if self._copied is not None and self._copied.query():
            self._shards = self._copied = None
        return self._shards is None

    def query(self) -> bool:
        """Whether the buffer holds the result, as `poll` says too."""
        return self.poll()


def free_beside_nccl(
    connections: Connections,
    device: Device,
    ranks: tuple[int, int],
    backoff: Backoff,
    free_bytes: Callable[[], int],
) -> int:
    """The bytes that are free on this rank's GPU while it has the most connections that a run
    makes, here all to one other rank; they are closed again.

    These are a peer connection in and out on either side of a stage, a group of replicas, and one
    of a tied weight. Both ranks call this together, `ranks` being equal for both.
    """
    one, other = ranks
    made: list[Closable] = []
    for number, (source, target) in enumerate([(one, other), (other, one)] * 2):
        made.append(connections.peer(f"trial connection {number}", source, target))
    for number in range(2):
        communicator = connections.communicator(f"trial group {number}", ranks)
        made.append(communicator)
        NcclCollective(communicator, device, backoff).warm_up([TRIED])
    free = free_bytes()
    for connection in reversed(made):
        connection.close()
    return free
