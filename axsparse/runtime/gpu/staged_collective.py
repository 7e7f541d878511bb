"""A `Collective` on buffers in GPU memory by way of the host, for ranks without NCCL.

What an operation reads of a buffer is copied to pinned memory, exchanged there by the
collective of the hosts, and what it changed is copied back. Operations are handed to the
hosts in the order in which they were started, whichever copy is complete first: so all
members start them alike. Sums have the bits of the hosts' collective.
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
    """An operation: first a copy, then the hosts', then a copy."""

    owner: StagedCollective
    op: Op
    buffer: Tensor
    host: Tensor
    bounds: list[int]
    copied: Event
    """To the host."""
    work: Work | None = None
    """Of the hosts."""
    back: Event | None = None

    def poll(self) -> bool:
        self.owner.advance()
        return self.back is not None and self.back.query()


class StagedCollective:
    """Operations over the members of a collective of hosts, which nobody else uses."""

    def __init__(self, hosts: Collective, device: Device, backoff: Backoff) -> None:
        self.rank = hosts.rank
        self.size = hosts.size
        self._hosts = hosts
        self._device = device
        self._stream = device.stream()
        self._backoff = backoff
        self._works: deque[StagedWork] = deque()

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the transport for other members since the group was made."""
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
        """Move all operations on, each as far as those before it allow."""
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
        """Wait for what is under way; the hosts' collective is closed by whoever made it."""
        self._backoff.reset()
        while self._works:
            self.advance()
            self._backoff.pause()

    def _copy(self, target: Tensor, source: Tensor, part: slice) -> None:
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
