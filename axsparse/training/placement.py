"""Placement of ranks: the device of each, and the transport to the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from axsparse.config.schema import Config
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import gather_values, sum_of, together
from axsparse.runtime.gpu.device import CudaDevice, Device
from axsparse.runtime.gpu.gpu_transport import GpuTransport
from axsparse.runtime.gpu.rank_gpus import (
    Gpu,
    RankGpu,
    choose_gpu_transport,
    describe,
    problem_of_nccl,
    rank_gpu,
    visible_gpus,
)
from axsparse.runtime.machine import peak_memory_bytes
from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.cuda.launch import CupyLauncher


@dataclass(frozen=True)
class Placement:
    """The device of this rank, and its transport to the others."""

    transport: Transport
    backend: Backend
    gpu: Device | None = None
    """The streams and the memory of this rank's GPU; None on a CPU."""
    table: Sequence[str] = ()
    """Lines for the screen that say which rank has which GPU; empty without GPUs."""
    memory: GpuMemory | None = None

    def peak_memory_bytes(self) -> int:
        """The most memory that this rank has held where it computes."""
        if self.backend.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.backend.device)
        return peak_memory_bytes()


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU, in bytes."""

    free: int
    """Bytes that no process had taken when this rank began to use the GPU."""
    total: int
    uuid: str
    """Names the GPU, the same for all ranks that share it."""


def bind_rank(transport: Transport, config: Config) -> Placement:
    """Bind this rank to a GPU, if there are any, and choose the transport.

    All ranks call this together. Raises ConfigError on all ranks if the setting `transport` asks
    for what these ranks lack, and on a rank that cannot reach the first one.
    """
    asked, where = config.transport, config.where("transport")
    local = transport.local_rank if isinstance(transport, MpiTransport) else 0
    nccl, host = dist.is_available() and dist.is_nccl_available(), socket.gethostname()
    gpu_here = rank_gpu(transport.rank, host, local, visible_gpus(), nccl=nccl, environ=os.environ)
    rank_gpus: list[RankGpu] = []  # needed only if there is a GPU
    if sum_of(transport, [float(gpu_here.gpu is not None)]) != [0.0]:
        rank_gpus = [_rank_gpu(**fields) for fields in gather_values(transport, asdict(gpu_here))]
    carrier = together(transport, lambda: choose_gpu_transport(asked, where, rank_gpus))
    number = gpu_here.number
    if carrier is None or number is None or gpu_here.gpu is None:
        return Placement(transport, HOST)
    uuid, table = gpu_here.gpu.uuid, describe(rank_gpus)
    if asked == "auto" and carrier == "mpi" and len(rank_gpus) > 1:
        table.append(
            f"warning: by way of the hosts, since NCCL cannot: {problem_of_nccl(rank_gpus)}"
        )
    backend, gpu, memory = together(transport, lambda: bind(number, uuid))
    if not isinstance(transport, MpiTransport) or transport.size == 1:
        return Placement(transport, backend, gpu, table, memory)  # one rank by itself
    connections = None
    if carrier == "nccl":
        from axsparse.runtime.gpu.nccl import NcclConnections, Rendezvous, nccl_backend

        rendezvous = Rendezvous(transport, nccl_backend)
        connections = NcclConnections(rendezvous, gpu, transport.backoff)
    reaching = GpuTransport(transport, gpu, connections=connections)
    return Placement(reaching, backend, gpu, table, memory)


def bind(number: int, uuid: str) -> tuple[Backend, CudaDevice, GpuMemory]:
    """Take a GPU for this process, and return its kernels, its streams and its memory.

    Raises ConfigError where it cannot be used, or its kernels cannot be compiled.
    """
    device = torch.device("cuda", number)
    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # the first call that needs the GPU itself
    except RuntimeError as reason:
        raise ConfigError(
            f"GPU {number} of host {socket.gethostname()} cannot be used "
            f"({str(reason).partition(chr(10))[0]}); see nvidia-smi there, or leave it out by "
            "CUDA_VISIBLE_DEVICES"
        ) from reason
    # Without this, torch rounds the factors of fp32 convolutions to 10 bits, and the factors of all
    # matrix products where a variable of NVIDIA's containers says so.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    backend = Backend(device, CupyLauncher(number))
    return backend, CudaDevice(device), GpuMemory(*torch.cuda.mem_get_info(device), uuid)


def _rank_gpu(gpu: Mapping[str, Any] | None, **fields: Any) -> RankGpu:
    return RankGpu(**fields, gpu=None if gpu is None else Gpu(**gpu))
