"""What `test_nccl_shared_gpu.py` starts under mpirun: two ranks, one GPU, NCCL between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from mpi4py import MPI
from support.collective_contract import CONTRACT as COLLECTIVE_CONTRACT
from support.collective_contract import a_buffer_lives_until_its_operation_is_done
from support.link_contract import CONTRACT
from support.on_gpu import GPU, MovedCollective, MovedLink

from axsparse.runtime.communication import Collective, Exchange, Link, Transport
from axsparse.runtime.gpu.cuda_device import CudaDevice
from axsparse.runtime.gpu.gpu_transport import GpuTransport
from axsparse.runtime.gpu.nccl import NcclConnections, Rendezvous, nccl_backend
from axsparse.runtime.grid import Place
from axsparse.runtime.mpi.mpi_transport import MpiTransport


class ByNccl(GpuTransport):
    """Moves what contracts send to the GPU, and from there on by NCCL."""

    def __init__(self, host: MpiTransport) -> None:
        device = CudaDevice(GPU)
        rendezvous = Rendezvous(host, nccl_backend)
        connections = NcclConnections(rendezvous, device, host.backoff)
        super().__init__(host, device, connections=connections)

    def link(self, place: Place) -> Link:
        return MovedLink(super().link(place))

    def collective(
        self, name: str, ranks: Sequence[int], planned: Sequence[Exchange] = ()
    ) -> Collective:
        return MovedCollective(super().collective(name, ranks, planned))


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_link_over_nccl_keeps_the_contract(promise: Callable[[Transport], None]) -> None:
    torch.cuda.set_device(GPU)
    transport = ByNccl(MpiTransport(MPI.COMM_WORLD))
    promise(transport)
    transport.close()


@pytest.mark.parametrize("promise", COLLECTIVE_CONTRACT, ids=lambda promise: promise.__name__)
def test_a_collective_over_nccl_keeps_the_contract(promise: Callable[[Transport], None]) -> None:
    torch.cuda.set_device(GPU)
    transport = ByNccl(MpiTransport(MPI.COMM_WORLD))
    hosts = transport.world
    if promise is not a_buffer_lives_until_its_operation_is_done:
        transport.world = transport.collective("all", range(transport.size))
    promise(transport)
    transport.world = hosts
    transport.close()
