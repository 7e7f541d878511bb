"""From the ranks of a job to ranks with GPUs: who sits where, and the transport between them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from axsparse.comm import Transport
from axsparse.config.load import Loaded
from axsparse.cuda_device import CudaDevice
from axsparse.data_parallel.agreement import gather_texts
from axsparse.device import CONNECTIONS, Gpu, Seat, choose_plane, describe, seat, visible_gpus
from axsparse.errors import ConfigError
from axsparse.job import together
from axsparse.machine import cuda_aware
from axsparse.transport import MpiTransport
from axsparse.transport_gpu import GpuTransport

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Placed:
    """Where this rank computes and how it reaches the others."""

    transport: Transport
    device: torch.device
    table: list[str]
    """Lines for the screen: which rank has which GPU; none without GPUs."""


def place(transport: Transport, loaded: Loaded) -> Placed:
    """Bind this rank to a GPU, if there are any, and choose the transport.

    All ranks call this together. Raises ConfigError on all of them if the setting
    `transport` cannot be had, and on one that cannot reach the first.
    """
    wanted, where = loaded.config.transport, loaded.where("transport")
    local = transport.local_rank() if isinstance(transport, MpiTransport) else 0
    nccl = dist.is_available() and dist.is_nccl_available()
    own = seat(
        transport.rank,
        socket.gethostname(),
        local,
        visible_gpus(),
        nccl=nccl,
        connections=os.environ.get(CONNECTIONS),
    )
    texts = gather_texts(transport.world, transport.backoff, json.dumps(asdict(own)))
    seats = [_read(text) for text in texts]
    plane = together(transport, lambda: choose_plane(wanted, where, seats))
    if plane is None or own.number is None:
        return Placed(transport, CPU, [])
    device = torch.device("cuda", own.number)
    torch.cuda.set_device(device)
    if not isinstance(transport, MpiTransport):
        return Placed(transport, device, describe(seats))  # one rank by itself
    if plane == "cuda-aware-mpi":
        together(transport, lambda: _refuse_blind_mpi(where))
    connections = None
    if plane == "nccl":
        from axsparse.nccl import NcclConnections, Rendezvous, nccl_backend

        rendezvous = Rendezvous(transport, nccl_backend)
        connections = NcclConnections(rendezvous, CudaDevice(device), transport.backoff)
    return Placed(
        GpuTransport(
            transport,
            CudaDevice(device),
            connections=connections,
            staging="direct" if plane == "cuda-aware-mpi" else "pinned",
        ),
        device,
        describe(seats),
    )


def _read(text: str) -> Seat:
    fields = json.loads(text)
    gpu = fields.pop("gpu")
    return Seat(**fields, gpu=None if gpu is None else Gpu(**gpu))


def _refuse_blind_mpi(where: str) -> None:
    if not cuda_aware():
        raise ConfigError(
            f"{where}: cuda-aware-mpi: this MPI library does not say that it reads GPU memory; "
            "load one that is built with CUDA, or choose nccl or mpi"
        )
