"""A `Collective` on buffers in GPU memory by way of the host, for ranks without NCCL.

The part of a buffer that an operation reads is copied to pinned memory and exchanged there by
the collective of the hosts, and the part that it has changed is copied back. Operations are
handed to the hosts in the order in which they were started, whichever copy is complete first, so
that all members start them in one order. Sums have the bits of the hosts' collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from axsparse.runtime.communication import Backoff, Collective, Event, Op, Work, shard_bounds
from axsparse.runtime.gpu.device_protocol import Device


@dataclass
class StagedWork:
    """An operation in three parts: a copy to the host, the exchange, and a copy back."""

    owner: StagedCollective
    op: Op
    buffer: Tensor
    host: Tensor
    bounds: list[int]
    copied: Event
    """Completes when the copy to the host has run."""
    work: Work | None = None
    """The exchange between the hosts; None until it has begun."""
    back: Event | None = None
    """Completes when the copy to the device has run; None until that has begun."""

    def poll(self) -> bool:
        self.owner.advance()
        return self.back is not None and self.back.query()


class StagedCollective:
    """A group that works through a collective of the hosts."""

    def __init__(self, hosts: Collective, device: Device, backoff: Backoff) -> None:
        """`hosts` is used by nobody else."""
        self.rank = hosts.rank
        self.size = hosts.size
        self._hosts = hosts
        self._device = device
        self._stream = device.stream()
        self._backoff = backoff
        self._works: deque[StagedWork] = deque()

    @property
    def bytes_sent(self) -> int:
        return self._hosts.bytes_sent

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> StagedWork:
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        host = self._device.pinned(buffer.nbytes).view(buffer.dtype)
        self._stream.wait(self._device.compute.record())
        self._copy(host, buffer, self._read(op, limits))
        work = StagedWork(self, op, buffer, host, limits, self._stream.record())
        self._works.append(work)
        self.advance()
        return work

    def advance(self) -> None:
        """Move all operations on, without letting one begin its exchange before an earlier one."""
        for work in self._works:
            if work.work is None:
                if not work.copied.query():
                    break
                work.work = self._hosts.start(work.op, work.host, work.bounds)
            if work.back is None and work.work.poll():
                self._copy(work.buffer, work.host, self._changed(work.op, work.bounds))
                work.back = self._stream.record()
        while self._works and (back := self._works[0].back) is not None and back.query():
            self._works.popleft()

    def close(self) -> None:
        """Wait for what is under way; whoever made the hosts' collective closes it."""
        self._backoff.reset()
        while self._works:
            self.advance()
            self._backoff.pause()

    def _copy(self, target: Tensor, source: Tensor, part: slice) -> None:
        """Enqueue the copy of a part, if there is anything in it."""
        if target[part].numel():
            self._stream.copy(target[part], source[part])

    def _read(self, op: Op, bounds: list[int]) -> slice:
        """The part of a buffer that an operation reads."""
        if op is Op.ALL_GATHER:
            return slice(bounds[self.rank], bounds[self.rank + 1])
        return slice(0, 0 if op is Op.BROADCAST and self.rank else bounds[-1])

    def _changed(self, op: Op, bounds: list[int]) -> slice:
        """The part of a buffer that an operation leaves its result in."""
        if op is Op.REDUCE_SCATTER:
            return slice(bounds[self.rank], bounds[self.rank + 1])
        return slice(0, 0 if op is Op.BROADCAST and not self.rank else bounds[-1])
