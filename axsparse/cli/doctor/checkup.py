"""What `axsparse doctor` concludes from the facts of all ranks: findings, each with its mend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from axsparse.cli.doctor.machine import MachineFacts
from axsparse.config.validate import counted
from axsparse.runtime.console import format_bytes

Mark = Literal["ok", "wrong", "slow", "absent"]
SIGNS: dict[Mark, str] = {"ok": "✓", "wrong": "✗", "slow": "!", "absent": "–"}
LEAST_CORES = 4
"""Cores that a rank with a GPU needs: Python, fetching batches, NCCL and torch each keep one busy
now and then."""
LEAST_LOCKED = 1 << 30
"""Bytes that a rank should be allowed to lock where an InfiniBand device is: NCCL and MPI lock
their buffers for it."""
LEAST_CUPY = 14
"""The first major version of CuPy that takes torch's streams."""
LEAST_ROOM = 10**9
"""Free bytes that are enough for logs and a small checkpoint."""

SHOWN = 3
"""How many leftover files a line names."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    mark: Mark
    name: str
    said: str
    mend: str = ""
    """What to do about it, if it is wrong or slow."""

    def __str__(self) -> str:
        mend = f" → {self.mend}" if self.mend else ""
        return f"{SIGNS[self.mark]} {self.name:14} {self.said}{mend}"


def findings(ranks: Sequence[MachineFacts]) -> list[Finding]:
    """All findings, in the order in which they are printed; `ranks` is in rank order."""
    return [
        _same("Python", ranks, lambda rank: rank.python),
        _same("axsparse", ranks, lambda rank: rank.axsparse),
        _same("torch", ranks, lambda rank: rank.torch),
        _mpi(ranks),
        _thread_level(ranks),
        _cuda(ranks),
        _same("NCCL", ranks, lambda rank: rank.nccl),
        _cupy(ranks),
        _placement(ranks),
        _devices(ranks),
        _cores(ranks),
        _cores_for_gpus(ranks),
        _infiniband(ranks),
        _locked_memory(ranks),
        _shared_memory(ranks),
        _disk(ranks),
    ]


def device_map(ranks: Sequence[MachineFacts]) -> list[str]:
    """A line for each host with its ranks, and the device that each of them uses."""
    lines = []
    for host, own in _by_host(ranks).items():
        devices = [f"{rank.rank} → {_device(rank, place)}" for place, rank in enumerate(own)]
        lines.append(f"host {host}: rank {', '.join(devices)}")
    return lines


def _device(rank: MachineFacts, place: int) -> str:
    """The device of the `place`-th rank of its host."""
    if not rank.gpus:
        return "cpu"
    # If the launcher showed this rank a single device only, that is its number 0.
    number = place % len(rank.gpus)
    return f"cuda:{number} ({rank.gpus[number]})"


def _same(
    name: str, ranks: Sequence[MachineFacts], value: Callable[[MachineFacts], str | None]
) -> Finding:
    """Whether all ranks have the same value; if not, the first rank that differs is named."""
    values = [value(rank) for rank in ranks]
    common = max(values, key=values.count)
    for rank, own in zip(ranks, values, strict=True):
        if own != common:
            return Finding(
                "wrong",
                name,
                f"rank {rank.rank} on host {rank.host} has {own or 'none'}, others {common}",
                "start all ranks from one environment",
            )
    return Finding("ok" if common else "absent", name, common or "none")


def _mpi(ranks: Sequence[MachineFacts]) -> Finding:
    for rank in ranks:
        if rank.mpi_problem is not None:
            said, _, mend = rank.mpi_problem.removeprefix("MPI: ").partition("; ")
            return Finding("wrong", "MPI", said, mend)
    found = _same("MPI", ranks, lambda rank: rank.mpi)
    if found.mark == "absent":
        return Finding("absent", "MPI", "no library: one rank, by itself")
    return found


def _thread_level(ranks: Sequence[MachineFacts]) -> Finding:
    found = _same("MPI threads", ranks, lambda rank: rank.thread_level)
    if found.mark == "ok" and found.said != "multiple":
        return Finding(
            "slow",
            "MPI threads",
            found.said,
            "take an MPI library with MPI_THREAD_MULTIPLE: a hang is ended sooner with it",
        )
    return found


def _cuda(ranks: Sequence[MachineFacts]) -> Finding:
    found = _same("CUDA", ranks, lambda rank: rank.cuda)
    if found.mark != "ok":
        return found
    counts = _same("CUDA", ranks, lambda rank: counted(len(rank.gpus), "device"))
    if counts.mark == "wrong":
        return Finding(
            "wrong", "CUDA", counts.said, "ask for the same number of GPUs on every node"
        )
    if not ranks[0].gpus:
        return Finding("absent", "CUDA", f"{found.said}, but no device")
    return Finding("ok", "CUDA", f"{found.said} · {', '.join(sorted(set(ranks[0].gpus)))}")


def _cupy(ranks: Sequence[MachineFacts]) -> Finding:
    found = _same("CuPy", ranks, lambda rank: rank.cupy)
    if found.mark == "absent" and ranks[0].gpus:
        major = _major(ranks[0].cuda)
        mend = f"pip install cupy-cuda{major}x, as the extra cuda{major} does"
        if major is None:
            mend = "install CuPy's build for torch's ROCm"
        return Finding("wrong", "CuPy", "cannot be imported, and runs the kernels of GPUs", mend)
    if found.mark != "ok":
        return found
    if ranks[0].gpus and int(_major(found.said) or 0) < LEAST_CUPY:
        return Finding(
            "wrong",
            "CuPy",
            f"{found.said} cannot take torch's streams",
            f"pip install 'cupy-cuda{_major(ranks[0].cuda)}x>={LEAST_CUPY}'",
        )
    for rank in ranks:
        pairs = (("CUDA", _major(rank.cupy_cuda), _major(rank.cuda)),)
        for what, own, torchs in (*pairs, ("NCCL", rank.cupy_nccl, rank.nccl)):
            if own is not None and torchs is not None and own != torchs:
                return Finding(
                    "wrong",
                    "CuPy",
                    f"{found.said} with {what} {own}, torch with {what} {torchs}, on host "
                    f"{rank.host}",
                    f"install the CuPy wheel of CUDA {_major(rank.cuda)}, without an NCCL of its "
                    "own",
                )
    return found


def _major(version: str | None) -> str | None:
    return None if version is None else version.partition(".")[0]


def _placement(ranks: Sequence[MachineFacts]) -> Finding:
    """Whether neighbouring ranks share hosts: they are neighbouring stages, which send the most."""
    hosts = [rank.host for rank in ranks]
    changes = sum(one != other for one, other in itertools.pairwise(hosts))
    count = len(set(hosts))
    said = f"{counted(len(hosts), 'rank')} on {counted(count, 'host')}"
    if changes >= count:
        return Finding(
            "wrong",
            "placement",
            f"{said}, neighbours on different hosts",
            "start with mpirun --map-by slot, mpirun -ppn N or srun --distribution=block",
        )
    return Finding("ok", "placement", said)


def _devices(ranks: Sequence[MachineFacts]) -> Finding:
    for host, own in _by_host(ranks).items():
        # A launcher may show each rank a different device as its first, so UUIDs are counted.
        gpus = len({uuid for rank in own for uuid in rank.uuids})
        if gpus and len(own) > gpus:
            return Finding(
                "slow",
                "devices",
                f"{len(own)} ranks share {counted(gpus, 'GPU')} on host {host}",
                f"start {counted(gpus, 'rank')} there",
            )
    gpus = len(ranks[0].gpus)
    if gpus:
        return Finding("ok", "devices", f"{gpus} a rank to see")
    return Finding("absent", "devices", "no GPU: ranks compute on cores")


def _cores(ranks: Sequence[MachineFacts]) -> Finding:
    for host, own in _by_host(ranks).items():
        cores = len({core for rank in own for core in rank.cores})
        where = f"{counted(len(own), 'rank')} on {counted(cores, 'core')} of host {host}"
        fair = max(1, cores // len(own))
        for rank in own:
            wanted = rank.threads_wanted
            if wanted is None and len(own) > 1:
                return Finding(
                    "wrong",
                    "threads",
                    f"OMP_NUM_THREADS is not set, {where}: each takes all cores",
                    "export OMP_NUM_THREADS=1",
                )
            if wanted is not None and not (wanted.isdigit() and int(wanted)):
                return Finding(
                    "wrong",
                    "threads",
                    f"OMP_NUM_THREADS is {wanted!r}, no number of threads",
                    "export OMP_NUM_THREADS=1",
                )
            if wanted is not None and int(wanted) > fair and int(wanted) > 1:
                return Finding(
                    "slow",
                    "threads",
                    f"OMP_NUM_THREADS is {wanted}, {where}",
                    f"export OMP_NUM_THREADS={fair}",
                )
        if len(own) > cores:
            return Finding(
                "slow",
                "threads",
                where,
                "start fewer ranks there, or take the binding to cores off (--bind-to none)",
            )
    wanted = ranks[0].threads_wanted or "not set"
    return Finding("ok", "threads", f"OMP_NUM_THREADS {wanted}, {_most_crowded(ranks)}")


def _cores_for_gpus(ranks: Sequence[MachineFacts]) -> Finding:
    """Whether what feeds a GPU has cores to run on."""
    least: float | None = None
    for host, own in _by_host(ranks).items():
        if not own[0].gpus:
            continue
        each = len({core for rank in own for core in rank.cores}) / len(own)
        least = each if least is None else min(least, each)
        if each < LEAST_CORES:
            return Finding(
                "slow",
                "cores",
                f"{each:.3g} a rank with a GPU on host {host}",
                "ask for more: axsparse submit --cpus-per-rank 7, srun --cpus-per-task=7, or "
                "mpirun --bind-to none",
            )
    if least is None:
        return Finding("absent", "cores", "no GPU that would need some beside")
    return Finding("ok", "cores", f"{least:.3g} a rank with a GPU")


def _infiniband(ranks: Sequence[MachineFacts]) -> Finding:
    hosts = {host: own[0].infiniband for host, own in _by_host(ranks).items()}
    having = [host for host, devices in hosts.items() if devices]
    if not having:
        return Finding("absent", "InfiniBand", "no device")
    for host, devices in hosts.items():
        if not devices:
            return Finding(
                "slow",
                "InfiniBand",
                f"host {host} has no device, and host {having[0]} has",
                "leave that host out, or ask the site why",
            )
    return Finding("ok", "InfiniBand", ", ".join(hosts[having[0]]))


def _locked_memory(ranks: Sequence[MachineFacts]) -> Finding:
    """What `ulimit -l` allows; devices of InfiniBand read memory only once it is locked."""
    for rank in ranks:
        limit = rank.locked_memory
        if limit is not None and limit < LEAST_LOCKED and rank.infiniband:
            return Finding(
                "slow",
                "locked memory",
                f"{format_bytes(limit)} on rank {rank.rank} of host {rank.host}, too little for "
                "InfiniBand",
                "ulimit -l unlimited before the launcher, or have the site set it for jobs",
            )
    limits = [rank.locked_memory for rank in ranks if rank.locked_memory is not None]
    return Finding("ok", "locked memory", format_bytes(min(limits)) if limits else "no limit")


def _most_crowded(ranks: Sequence[MachineFacts]) -> str:
    own = max(_by_host(ranks).values(), key=len)
    cores = len({core for rank in own for core in rank.cores})
    return f"{counted(len(own), 'rank')} on {counted(cores, 'core')}"


def _shared_memory(ranks: Sequence[MachineFacts]) -> Finding:
    for host, own in _by_host(ranks).items():
        left = own[0].leftovers
        if left:
            more = len(left) - SHOWN
            return Finding(
                "wrong",
                "shared memory",
                f"{counted(len(left), 'file')} of killed jobs on host {host}",
                f"rm {' '.join(left[:SHOWN])}"
                + (f" (and {more} more: --json)" if more > 0 else ""),
            )
    return Finding("ok", "shared memory", "no leftovers")


def _disk(ranks: Sequence[MachineFacts]) -> Finding:
    for own in _by_host(ranks).values():
        rank = own[0]
        if not rank.writable:
            return Finding(
                "wrong",
                "disk",
                f"{rank.where} on host {rank.host} cannot be written",
                "choose another --run-dir",
            )
        if rank.room < LEAST_ROOM:
            return Finding(
                "wrong",
                "disk",
                f"{format_bytes(rank.room)} free in {rank.where} on host {rank.host}",
                f"make room for {format_bytes(LEAST_ROOM)} at least, or choose another --run-dir",
            )
    return Finding("ok", "disk", f"{format_bytes(ranks[0].room)} free in {ranks[0].where}")


def _by_host(ranks: Iterable[MachineFacts]) -> dict[str, list[MachineFacts]]:
    hosts: dict[str, list[MachineFacts]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return hosts
