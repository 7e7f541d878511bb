"""The contracts, for several ranks on one GPU under mpirun.

They speak of tensors in host memory, which are moved to the GPU and back.

`test_transport_gpu.py` starts them by way of the hosts, and over NCCL by a variable of NCCL's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from mpi4py import MPI
from support.collective_contract import CONTRACT as COLLECTIVE_CONTRACT
from support.collective_contract import a_buffer_lives_until_its_operation_is_done
from support.link_contract import CONTRACT
from torch import Tensor

from axsparse.models.layer import TensorShard
from axsparse.runtime.communication import Collective, Link, Message, Op, Transport, Work
from axsparse.runtime.gpu.device import CudaDevice
from axsparse.runtime.gpu.gpu_transport import GpuTransport
from axsparse.runtime.gpu.nccl import NcclConnections, Rendezvous, nccl_backend
from axsparse.runtime.grid import Grid, RankCoords
from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.tensor_parallel.group import TensorGroup

GPU = torch.device("cuda", 0)


class MovedLink:
    """Sends copies on the GPU, made late: compute is kept busy before each."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

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


class MovedCollective:
    """Operations on a copy on the GPU."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

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

    def __init__(self, host: MpiTransport, *, nccl: bool) -> None:
        device = CudaDevice(GPU)
        connections = None
        if nccl:
            connections = NcclConnections(Rendezvous(host, nccl_backend), device, host.backoff)
        super().__init__(host, device, connections=connections)

    def link(self, coords: RankCoords) -> Link:
        return cast("Link", MovedLink(super().link(coords)))

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        return cast("Collective", MovedCollective(super().collective(name, ranks)))


NCCL = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_link_keeps_the_contract_on_a_gpu(promise: Callable[[Transport], None]) -> None:
    torch.cuda.set_device(GPU)
    transport = OnGpu(MpiTransport(MPI.COMM_WORLD), nccl=NCCL)
    promise(transport)
    transport.close()


def test_members_have_the_sum_and_over_nccl_their_hosts_go_on() -> None:
    torch.cuda.set_device(GPU)
    host = MpiTransport(MPI.COMM_WORLD)
    device = CudaDevice(GPU)
    connections = NcclConnections(Rendezvous(host, nccl_backend), device, host.backoff)
    transport = GpuTransport(host, device, connections=connections if NCCL else None)
    size = host.size
    group = TensorGroup(Grid(1, 1, size).coords(host.rank), transport, on_gpus=True)
    drawn = torch.rand(size, 1 << 16, generator=torch.Generator().manual_seed(3)) - 0.5
    shard = TensorShard((size, 1 << 16), 0, group.rank, size)
    own = drawn[group.rank].to(GPU)
    torch.cuda.synchronize()

    for _ in range(3):  # the first use of a kernel, and new memory, may wait for what runs
        torch.cuda._sleep(200_000_000)
        part = own + 0
        total = group.all_reduce(part)
        whole = group.gather(shard, part)
        is_early = not device.compute.record().query()
        torch.cuda.synchronize()

    assert is_early or not NCCL, "compute is still asleep, and no host waits for a sum"
    assert torch.equal(whole.cpu(), drawn)
    assert torch.allclose(total.cpu(), drawn.sum(0), atol=1e-6)
    transport.close()


@pytest.mark.parametrize("promise", COLLECTIVE_CONTRACT, ids=lambda promise: promise.__name__)
def test_a_collective_keeps_the_contract_on_a_gpu(promise: Callable[[Transport], None]) -> None:
    torch.cuda.set_device(GPU)
    transport = OnGpu(MpiTransport(MPI.COMM_WORLD), nccl=NCCL)
    hosts = transport.world
    if promise is not a_buffer_lives_until_its_operation_is_done:
        transport.world = transport.collective("all", range(transport.size))
    promise(transport)
    transport.world = hosts
    transport.close()
