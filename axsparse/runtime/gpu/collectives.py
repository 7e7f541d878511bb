"""Collectives on buffers in GPU memory: over NCCL, or by way of the hosts.

NCCL exchanges and adds in GPU memory. An operation is enqueued at once, behind the compute that
makes its buffer and behind earlier operations of the same group, which every rank starts in one
order. The host only asks whether it has run, or has compute wait for it
(`NcclWork.before_compute`). NCCL adds in an unspecified order, so its sums equal the sums of other
transports only within a tolerance. bf16 and fp16 travel and are added in their own precision.

Ranks without NCCL copy the part of a buffer that an operation reads to pinned memory, exchange it
there by the collective of the hosts, and copy the part that it has changed back. Sums have the bits
of the hosts' collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Collective, Event, Op, Work, shard_bounds, wait
from axsparse.runtime.exchange import exchanged_bytes
from axsparse.runtime.gpu.device import Device

if TYPE_CHECKING:
    from axsparse.runtime.gpu.nccl import NcclGroup


@dataclass
class NcclWork:
    """An operation under way, which keeps its buffer alive."""

    owner: NcclCollective
    buffer: Tensor | None
    """None once the compute stream waits."""
    event: Event | None

    def poll(self) -> bool:
        return self.event is None or self.event.query()

    def before_compute(self) -> None:
        """Have the compute stream wait for the operation, and not the host.

        Kernels enqueued from now on find the result in the buffer, and may use its memory anew. The
        compute stream then waits for other GPUs, so use this only for operations that all ranks of
        the group start without waiting for anybody else.
        """
        if self.event is not None:
            self.owner.device.compute.wait(self.event)
            self.owner.awaited.append(self.event)
        self.buffer = None


class NcclCollective:
    """Operations over the members of one communicator, on buffers in GPU memory. Several of them
    may share a communicator, since members start the operations of all groups in one order."""

    def __init__(self, communicator: NcclGroup, device: Device, backoff: Backoff) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.bytes_sent = 0
        self.device = device
        self._communicator = communicator
        self._backoff = backoff
        self._last: NcclWork | None = None
        self.awaited = deque[Event]()
        """Operations that compute waits for and the host has not seen complete."""

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> NcclWork:
        self.advance()
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        is_needed = self.size > 1 and buffer.numel() > 0
        self._last = NcclWork(self, buffer, self._call(op, buffer, limits) if is_needed else None)
        return self._last

    def advance(self) -> None:
        """Look at the operations that compute waits for: TrainingError for one that failed."""
        while self.awaited and self.awaited[0].query():
            self.awaited.popleft()

    def close(self) -> None:
        """Wait for the running operations; whoever made the communicator closes it."""
        if self._last is not None:
            wait(self._last, self._backoff)

    def _call(self, op: Op, buffer: Tensor, bounds: list[int]) -> Event:
        """Enqueue an operation that runs once compute has made its buffer."""
        communicator = self._communicator
        communicator.stream.wait(self.device.compute.record())
        if op in (Op.BROADCAST, Op.ALL_GATHER):
            # NCCL knows no int16, so buffers whose values are not added go as bytes.
            bounds = [bound * buffer.itemsize for bound in bounds]
            buffer = buffer.view(torch.uint8)
        if op is Op.ALL_REDUCE:
            return communicator.all_reduce(buffer)
        if op is Op.BROADCAST:
            return communicator.broadcast(buffer)
        if op is Op.REDUCE_SCATTER:
            return communicator.reduce_scatter(buffer, bounds)
        return communicator.all_gather(buffer, bounds)


@dataclass
class StagedWork:
    """An operation in three parts: a copy to the host, the exchange, and a copy back."""

    owner: StagedCollective
    op: Op
    buffer: Tensor
    host: Tensor
    bounds: list[int]
    copied: Event
    work: Work | None = None
    """The exchange between the hosts; None until it has begun."""
    back: Event | None = None
    """Completes when the copy to the device has run; None until that has begun."""

    def poll(self) -> bool:
        self.owner.advance()
        return self.back is not None and self.back.query()


class StagedCollective:
    """A group that works through a collective of the hosts.

    Operations are handed to the hosts in the order in which they were started, whichever copy is
    complete first, so that all members start them in one order.
    """

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
        """Wait for the running operations; whoever made the hosts' collective closes it."""
        self._backoff.reset()
        while self._works:
            self.advance()
            self._backoff.pause()

    def _copy(self, target: Tensor, source: Tensor, part: slice) -> None:
        """Enqueue the copy of a part, if there is anything in it."""
        if target[part].numel():
            self._stream.copy(target[part], source[part])

    def _read(self, op: Op, bounds: list[int]) -> slice:
        if op is Op.ALL_GATHER:
            return slice(bounds[self.rank], bounds[self.rank + 1])
        return slice(0, 0 if op is Op.BROADCAST and self.rank else bounds[-1])

    def _changed(self, op: Op, bounds: list[int]) -> slice:
        if op is Op.REDUCE_SCATTER:
            return slice(bounds[self.rank], bounds[self.rank + 1])
        return slice(0, 0 if op is Op.BROADCAST and not self.rank else bounds[-1])


class TwoWayCollective:
    """A group with one collective for buffers in host memory and one for buffers on GPUs."""

    def __init__(self, hosts: Collective, devices: Collective, kind: str) -> None:
        self.rank = hosts.rank
        self.size = hosts.size
        self._hosts = hosts
        self._devices = devices
        self._kind = kind

    @property
    def bytes_sent(self) -> int:
        return self._hosts.bytes_sent + self._devices.bytes_sent

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        group = self._devices if buffer.device.type == self._kind else self._hosts
        return group.start(op, buffer, bounds)
