"""A `Collective` over NCCL, which exchanges and adds compressed gradients in GPU memory.

An operation is enqueued at once, behind the compute that makes its buffer and behind
earlier operations of the same group; the host only asks whether it has run. Every member
starts its operations in one order (`data_parallel/gradient_sync.py` sees to that), so nothing
that becomes ready early on one GPU can hold up another.

NCCL adds in an order of its own, so its sums equal those of other transports only within a
tolerance. bf16 and fp16 travel and are added in their own precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Event, Op, shard_bounds
from axsparse.runtime.gpu.device_protocol import Communicator, Device
from axsparse.runtime.rank_order import exchanged_bytes


class NcclWork:
    """An operation under way, which keeps its buffer alive."""

    def __init__(self, buffer: Tensor, event: Event) -> None:
        self._buffer = buffer
        self._event = event

    def poll(self) -> bool:
        return self._event.query()


class NcclCollective:
    """Operations over the members of one communicator, on buffers in GPU memory."""

    def __init__(self, communicator: Communicator, device: Device, backoff: Backoff) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.bytes_sent = 0
        self._communicator = communicator
        self._device = device
        self._backoff = backoff
        self._last: NcclWork | None = None

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> NcclWork:
        assert buffer.dim() == 1 and buffer.is_contiguous(), "collectives need flat buffers"
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        stream = self._communicator.stream
        stream.wait(self._device.compute.record())
        if self.size > 1 and buffer.numel():
            self._enqueue(op, buffer, limits)
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        self._last = NcclWork(buffer, stream.record())
        return self._last

    def close(self) -> None:
        """Wait for what is under way and release the communicator."""
        self._backoff.reset()
        while self._last is not None and not self._last.poll():
            self._backoff.pause()
        self._communicator.close()

    def _enqueue(self, op: Op, buffer: Tensor, bounds: list[int]) -> None:
        """Enqueue an operation as one or more calls of the communicator."""
        communicator = self._communicator
        if op in (Op.BROADCAST, Op.ALL_GATHER):
            # Nothing is added, so buffers go as bytes, since NCCL knows no int16.
            bounds = [bound * buffer.itemsize for bound in bounds]
            buffer = buffer.view(torch.uint8)
        if op is Op.ALL_REDUCE:
            communicator.all_reduce(buffer)
        elif op is Op.BROADCAST:
            communicator.broadcast(buffer, 0)
        elif len({stop - start for start, stop in itertools.pairwise(bounds)}) == 1:
            own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
            if op is Op.REDUCE_SCATTER:
                communicator.reduce_scatter(own, buffer)
            else:
                communicator.all_gather(buffer, own)
        else:
            # NCCL's own calls take equal shards only. One call for each shard moves as many bytes.
            for root, (start, stop) in enumerate(itertools.pairwise(bounds)):
                if start < stop and op is Op.REDUCE_SCATTER:
                    communicator.reduce(buffer[start:stop], root)
                elif start < stop:
                    communicator.broadcast(buffer[start:stop], root)
