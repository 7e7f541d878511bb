"""Contracts speak of tensors in host memory; this moves what they send to a GPU and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from axsparse.runtime.communication import (
    Collective,
    Link,
    Message,
    Op,
    Work,
)
from axsparse.runtime.gpu.cuda_device import CudaDevice
from axsparse.runtime.gpu.gpu_transport import GpuTransport, HostTransport
from axsparse.runtime.gpu.nccl import NcclConnections, Rendezvous, nccl_backend
from axsparse.runtime.grid import Place

GPU = torch.device("cuda", 0)


class MovedLink:
    """Sends copies on the GPU, made late: compute is kept busy before each."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    def push(self) -> None:
        self._link.push()

    @property
    def unsent(self) -> int:
        return self._link.unsent

    def send(self, message: Message) -> None:
        torch.cuda._sleep(200_000)
        moved = tuple(None if t is None else t.detach().to(GPU) for t in message.tensors)
        self._link.send(replace(message, tensors=moved))

    def arrivals(self) -> list[Message]:
        messages = self._link.arrivals()
        for message in messages:
            assert all(tensor is None or tensor.is_cuda for tensor in message.tensors)
        return [
            replace(message, tensors=tuple(None if t is None else t.cpu() for t in message.tensors))
            for message in messages
        ]

    def close(self) -> None:
        self._link.close()


class MovedCollective:
    """Operations on a copy on the GPU."""

    def __init__(self, collective: Collective) -> None:
        self.rank = collective.rank
        self.size = collective.size
        self._collective = collective

    @property
    def bytes_sent(self) -> int:
        return self._collective.bytes_sent

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        torch.cuda._sleep(200_000)
        moved = buffer.to(GPU)
        return _Moved(self._collective.start(op, moved, bounds), buffer, moved)


class _Moved:
    def __init__(self, work: Work, buffer: Tensor, moved: Tensor) -> None:
        self._work = work
        self._buffer = buffer
        self._moved = moved

    def poll(self) -> bool:
        if not self._work.poll():
            return False
        self._buffer.copy_(self._moved)
        return True


class OnGpu(GpuTransport):
    """Ranks that all share the first GPU, over NCCL or by way of the hosts."""

    def __init__(self, host: HostTransport, *, nccl: bool) -> None:
        device = CudaDevice(GPU)
        connections = None
        if nccl:
            connections = NcclConnections(Rendezvous(host, nccl_backend), device, host.backoff)
        super().__init__(host, device, connections=connections)

    def link(self, place: Place) -> Link:
        return MovedLink(super().link(place))

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return MovedCollective(super().collective(name, ranks))
