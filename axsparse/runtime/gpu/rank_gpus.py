"""Which GPU each rank has: its binding, the table of all ranks, and NCCL's requirements."""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from axsparse.runtime.errors import ConfigError

LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
)
"""Environment variables with the local rank on its host: of Open MPI, MPICH and Intel MPI, srun,
Cray, HPE's PALS, IBM's jsrun. The first that is set counts: srun's may be the number of a daemon of
an mpirun."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable with the number of queues between host and GPU. Work that shares a
queue runs in order, and a receive that spins could be in front of the send that it waits for."""
CONNECT_AT_ONCE = "NCCL_RUNTIME_CONNECT"
"""The environment variable by which NCCL from 2.22 on connects each of its algorithms at its first
use, and holds up the host meanwhile, which others may wait for; 0 connects all with the group."""
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Environment variables with which the host waits until its GPU, or NCCL, is done."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A file with a number that is drawn at every start of a machine and is the same in all of its
containers; NCCL also identifies machines by it."""
BUS = ("pci_domain_id", "pci_bus_id", "pci_device_id")
"""The properties of a device that say where on the bus it is; torch 2.4 does not have them."""
GpuTransportName = Literal["nccl", "mpi"]
"""How tensors travel between GPUs; `mpi` is through pinned memory of the hosts."""


@dataclass(frozen=True)
class Gpu:
    """A device that a rank may use."""

    name: str
    uuid: str
    """The same in all processes, whichever devices each of them may see."""
    bus_address: str = ""
    """The machine and the place on its bus; empty if torch does not say. Slices of one GPU (MIG)
    have this in common, and NCCL cannot connect devices that do."""


@dataclass(frozen=True)
class RankGpu:
    """One rank's host and GPU, and whether it can use NCCL."""

    rank: int
    host: str
    number: int | None = None
    gpu: Gpu | None = None
    nccl: bool = False
    hindrance: str | None = None
    """A setting in the rank's environment that NCCL cannot work with, and why; or None."""


def local_rank(environ: Mapping[str, str]) -> int | None:
    """The local rank on this host, as the launcher says it before MPI starts."""
    for name in LOCAL_RANKS:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def bind_early(environ: MutableMapping[str, str]) -> None:
    """Set the number of queues, how NCCL connects, and the GPU that the launcher means, before CUDA
    and MPI start.

    An MPI library that reads GPU memory takes the GPU that is the current one when it starts.
    Without a GPU the environment stays as it is.
    """
    wanted = {CONNECTIONS: "32", CONNECT_AT_ONCE: "0"}
    own = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(own)
    if not torch.cuda.is_available():
        for name in own:
            del environ[name]
        return
    local = local_rank(environ)
    if local is not None:
        # A GPU that cannot be used is reported later, once MPI can end the other ranks, too.
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_device(local % torch.cuda.device_count())


def machine_name() -> str:
    """The name of this host, with a part that separates it from others of that name, such as
    containers."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text().strip()
    return f"{socket.gethostname()}/{boot}"


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use, in torch's order."""
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        bus = [getattr(properties, name, None) for name in BUS]
        bus_address = "" if None in bus else f"{machine_name()} {bus}"
        gpus.append(Gpu(properties.name, str(properties.uuid), bus_address))
    return gpus


def rank_gpu(
    rank: int, host: str, local: int, gpus: Sequence[Gpu], *, nccl: bool, environ: Mapping[str, str]
) -> RankGpu:
    """The GPU of a rank: its `local` rank on its host modulo the number of visible ones, which is
    right if each rank sees all GPUs of its host, and also if each sees one GPU alone."""
    number = local % len(gpus) if gpus else None
    gpu = None if number is None else gpus[number]
    return RankGpu(rank, host, number, gpu, nccl, _hindrance(environ))


def _hindrance(environ: Mapping[str, str]) -> str | None:
    if environ.get(CONNECTIONS) == "1":
        why = "a receive could stand in front of the send that it waits for"
        return f"{CONNECTIONS}=1 is set, so that {why}; unset it"
    for name in (*BLOCKING, CONNECT_AT_ONCE):
        if environ.get(name, "0") not in ("", "0"):
            why = "a rank that sends would wait for a receiver that waits for it"
            return f"{name}={environ[name]} is set, so that {why}; unset it"
    return None


def choose_gpu_transport(
    asked: str, where: str, rank_gpus: Sequence[RankGpu]
) -> GpuTransportName | None:
    """The transport between GPUs, the same on every rank; None if no rank has a GPU. ConfigError if
    the ranks cannot work with the one that is `asked` for, a setting that was set `where`."""
    without = next((one for one in rank_gpus if one.gpu is None), None)
    with_gpu = next((one for one in rank_gpus if one.gpu is not None), None)
    if with_gpu is None:
        return None
    if without is not None:
        raise ConfigError(
            f"transport: rank {without.rank} on host {without.host} sees no GPU and rank "
            f"{with_gpu.rank} on host {with_gpu.host} does; have the launcher give every rank one, "
            "or train on CPUs by CUDA_VISIBLE_DEVICES= (empty)"
        )
    if asked == "mpi":
        return "mpi"
    problem = problem_of_nccl(rank_gpus)
    if asked == "nccl" and problem is not None:
        raise ConfigError(f"{where}: nccl: {problem}, or choose transport: mpi")
    for one in rank_gpus if problem is None and len(rank_gpus) > 1 else ():
        if one.hindrance is not None:
            raise ConfigError(
                f"transport: nccl: on rank {one.rank} of host {one.host} {one.hindrance}, or "
                "choose transport: mpi"
            )
    return "mpi" if problem is not None else "nccl"


def problem_of_nccl(rank_gpus: Sequence[RankGpu]) -> str | None:
    """The reason why these ranks cannot use NCCL, and a suggestion; None if they can."""
    lacking = next((one for one in rank_gpus if not one.nccl), None)
    if lacking is not None:
        return (
            f"the torch of rank {lacking.rank} on host {lacking.host} is built without it; "
            "install torch with CUDA for Linux"
        )
    addresses: dict[str, RankGpu] = {}
    for one in rank_gpus:
        assert one.gpu is not None, "all ranks have one"
        for place in (one.gpu.uuid, one.gpu.bus_address or one.gpu.uuid):
            first = addresses.setdefault(place, one)
            if first is not one:
                return (
                    f"ranks {first.rank} and {one.rank} share GPU {first.number} of host "
                    f"{first.host}; start no more ranks a host than it has GPUs"
                )
    return None


def describe(rank_gpus: Sequence[RankGpu]) -> list[str]:
    """A line for each host that names the GPU of each rank, then warnings about shared GPUs."""
    hosts: dict[str, list[tuple[RankGpu, Gpu]]] = defaultdict(list)
    for one in rank_gpus:
        if one.gpu is not None:
            hosts[one.host].append((one, one.gpu))
    lines, warnings = [], []
    for host, here in hosts.items():
        ranks = ", ".join(f"rank {one.rank} → GPU {one.number}" for one, _ in here)
        names = ", ".join(sorted({gpu.name for _, gpu in here}))
        lines.append(f"host {host}: {ranks} ({names})")
        gpus = len({gpu.uuid for _, gpu in here})
        if len(here) > gpus:
            warnings.append(
                f"warning: host {host} has {len(here)} ranks on {gpus} "
                f"GPU{'s' * (gpus > 1)}, which take turns; start one rank a GPU"
            )
    return lines + warnings
