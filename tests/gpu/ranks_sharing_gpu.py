"""The contracts, for several ranks on one GPU under mpirun.

`test_nccl_shared_gpu.py` starts them with NCCL between them, by a variable of NCCL's, and
`test_transport_gpu.py` by way of the hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from support.collective_contract import CONTRACT as COLLECTIVE_CONTRACT
from support.collective_contract import a_buffer_lives_until_its_operation_is_done
from support.link_contract import CONTRACT
from support.on_gpu import GPU, OnGpu

from axsparse.runtime.communication import Transport
from axsparse.runtime.mpi.mpi_transport import MpiTransport

NCCL = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_a_link_keeps_the_contract_on_a_gpu(promise: Callable[[Transport], None]) -> None:
    torch.cuda.set_device(GPU)
    transport = OnGpu(MpiTransport(MPI.COMM_WORLD), nccl=NCCL)
    promise(transport)
    transport.close()


@pytest.mark.parametrize("promise", COLLECTIVE_CONTRACT, ids=lambda promise: promise.__name__)
def test_a_collective_keeps_the_contract_on_a_gpu(
    promise: Callable[[Transport], None],
) -> None:
    torch.cuda.set_device(GPU)
    transport = OnGpu(MpiTransport(MPI.COMM_WORLD), nccl=NCCL)
    hosts = transport.world
    if promise is not a_buffer_lives_until_its_operation_is_done:
        transport.world = transport.collective("all", range(transport.size))
    promise(transport)
    transport.world = hosts
    transport.close()
