"""Unequal shards as equal ones, since NCCL's reduce-scatter and all-gather take equal ones only.

Shards of unequal size would be a reduce or a broadcast for each member, one behind the other: with
64 members 64 calls a bucket, each as slow as its latency. Instead they are copied into a buffer in
which every shard has the room of the largest, and one call exchanges that. Shares of sharded state
differ by a block or two (`samo/shards.py`), so the buffer is hardly larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from axsparse.runtime.communication import Event, Op
from axsparse.runtime.gpu.device_protocol import Device, Stream

MOST_PADDING = 2
"""Shards are padded if that makes the buffer less than this many times as large; otherwise, as if
one member had all of it, they travel one by one."""


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
