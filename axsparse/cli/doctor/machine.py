"""Facts that one process finds out about its machine without changing it, for `axsparse doctor`."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from axsparse.runtime.shared_segments import PROCESSES, SHARED, leftovers


@dataclass(frozen=True)
class MachineFacts:
    """What one rank sees of its machine; None for what it does not have."""

    rank: int
    size: int
    host: str
    python: str
    axsparse: str
    torch: str
    mpi: str | None
    """Vendor and version of the MPI library."""
    mpi_problem: str | None
    """Why MPI cannot be used, or does not agree with the launcher."""
    thread_level: str | None
    cuda: str | None
    """The CUDA version that torch was built for."""
    gpus: tuple[str, ...]
    """Names of the devices that this rank may use, in torch's order."""
    uuids: tuple[str, ...]
    """UUIDs of the same devices, which name a device alike on all ranks."""
    nccl: str | None
    cupy: str | None
    cupy_cuda: str | None
    cupy_nccl: str | None
    threads_wanted: str | None
    """The value of OMP_NUM_THREADS."""
    cores: tuple[int, ...]
    """The cores that this rank may run on."""
    locked_memory: int | None
    """Bytes of memory that this process may lock, `ulimit -l`; None without a limit."""
    infiniband: tuple[str, ...]
    """Names of the host's InfiniBand devices, and of others that are used like them."""
    leftovers: tuple[str, ...]
    """Files in /dev/shm that no process uses any more."""
    room: int
    """Bytes free in the folder `where`."""
    writable: bool
    """Whether the folder `where` can be written."""
    where: str
    """The run directory, or the nearest existing folder above it."""


def look(rank: int, size: int, mpi: Mpi, run_dir: Path) -> MachineFacts:
    """The facts of this process."""
    import torch

    from axsparse.runtime.gpu.rank_gpus import visible_gpus
    from axsparse.runtime.version import __version__

    where = _nearest(run_dir)
    cupy, cupy_cuda, cupy_nccl = _cupy()
    gpus = visible_gpus()
    return MachineFacts(
        rank=rank,
        size=size,
        host=socket.gethostname(),
        python=platform.python_version(),
        axsparse=__version__,
        torch=torch.__version__,
        mpi=mpi.library,
        mpi_problem=mpi.problem,
        thread_level=mpi.thread_level,
        cuda=torch.version.cuda,
        gpus=tuple(gpu.name for gpu in gpus),
        uuids=tuple(gpu.uuid for gpu in gpus),
        nccl=_dotted(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
        cupy=cupy,
        cupy_cuda=cupy_cuda,
        cupy_nccl=cupy_nccl,
        threads_wanted=os.environ.get("OMP_NUM_THREADS"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        locked_memory=_locked_memory(),
        infiniband=tuple(infiniband(Path("/sys/class/infiniband"))),
        leftovers=tuple(leftovers(SHARED, PROCESSES)),
        room=shutil.disk_usage(where).free,
        writable=os.access(where, os.W_OK | os.X_OK),
        where=str(where),
    )


@dataclass(frozen=True)
class Mpi:
    """What the transport knows about the MPI library."""

    library: str | None = None
    thread_level: str | None = None
    problem: str | None = None


def _locked_memory() -> int | None:
    """Bytes of memory that this process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def infiniband(devices: Path) -> list[str]:
    """Names of the devices in a folder of the kernel's; none where it has no such folder."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in devices.iterdir())
    return []


def _nearest(path: Path) -> Path:
    """The folder itself, or the nearest existing one above it."""
    here = path.absolute()
    while not here.is_dir():
        here = here.parent
    return here


def _cupy() -> tuple[str | None, str | None, str | None]:
    """The versions of CuPy, and of the CUDA and NCCL that it uses."""
    if "torch" not in sys.modules:
        raise AssertionError("torch has to be imported first, so that both use its libnccl")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None, None, None
    cuda = nccl = None
    with contextlib.suppress(Exception):  # CuPy's own errors have no common base
        number = cupy.cuda.runtime.runtimeGetVersion()
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    with contextlib.suppress(Exception):
        number = importlib.import_module("cupy.cuda.nccl").get_version()
        nccl = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return str(cupy.__version__), cuda, nccl


def _dotted(version: object) -> str:
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
