"""`axsparse doctor`: checks whether a machine, or all ranks of a launcher, can train.

Each rank finds out the facts of its machine, and rank 0 concludes from those of all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from axsparse.cli.parser import CommandParser, say
from axsparse.config.validate import counted
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import EXIT_INTERNAL, ConfigError
from axsparse.runtime.launcher import speaks, write_line
from axsparse.runtime.process_exit import exit_process
from axsparse.runtime.shared_segments import PROCESSES, SHARED, leftovers

if TYPE_CHECKING:
    from axsparse.runtime.communication import Transport

EXIT_WRONG = 1
DESCRIPTION = """\
Check whether this machine is fit for training; under a launcher, whether all ranks are.

  axsparse doctor
  mpirun -n 4 axsparse doctor
  srun -n 8 --mpi=pmi2 axsparse doctor --run-dir /scratch/me/run --json

✓ is well, ✗ is wrong, ! works but is slow, – is not there and need not be.
"""
EPILOG = """\
exit codes:
  0 nothing is wrong   1 something is   78 arguments that cannot be run
"""
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
INFINIBAND = Path("/sys/class/infiniband")
"""Where the kernel shows its InfiniBand devices."""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(prog="axsparse doctor", description=DESCRIPTION, epilog=EPILOG)
    arguments.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        default=Path("runs"),
        help="where runs will write (default %(default)s)",
    )
    arguments.add_argument("--json", action="store_true", help="print all facts as one object")
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Examine, print, and end the process; all ranks of a launcher call this together."""
    arguments = parser().parse_args(argv)
    # Imported late, so that --help loads neither torch nor MPI.
    from axsparse.runtime.connection import connect
    from axsparse.runtime.exchange import gather_texts
    from axsparse.runtime.local.local_transport import LocalTransport
    from axsparse.runtime.local.local_world import LocalWorld

    problem = None
    try:
        transport = connect()
    except ConfigError as error:
        # The ranks cannot connect, so that each looks at itself and only the first one prints.
        transport, problem = LocalTransport(LocalWorld(1), 0), str(error)
    try:
        facts = json.dumps(asdict(look(transport, arguments.run_dir, problem)))
        texts = gather_texts(transport.world, transport.backoff, facts)
    except Exception as failure:  # any failure has to end the other ranks, which wait
        write_line(f"error: doctor: rank {transport.rank}: {failure}")
        transport.abort(EXIT_INTERNAL)
    ranks = [MachineFacts(**json.loads(text)) for text in texts]
    concluded = findings(ranks)
    if transport.rank == 0 and (speaks() or problem is None):
        _print(concluded, ranks, as_json=arguments.json)
    transport.close()
    exit_process(EXIT_WRONG if any(finding.mark == "wrong" for finding in concluded) else 0)


# --- facts -------------------------------------------------------------------------------


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
    gpus: Sequence[str]
    """Names of the devices that this rank may use, in torch's order."""
    uuids: Sequence[str]
    """UUIDs of the same devices, which name a device alike on all ranks."""
    nccl: str | None
    cupy: str | None
    cupy_cuda: str | None
    cupy_nccl: str | None
    threads_wanted: str | None
    """The value of OMP_NUM_THREADS."""
    cores: Sequence[int]
    """The cores that this rank may run on."""
    locked_memory: int | None
    """Bytes of memory that this process may lock, `ulimit -l`; None without a limit."""
    infiniband: Sequence[str]
    """Names of the host's InfiniBand devices, and of others that are used like them."""
    leftovers: Sequence[str]
    """Files in /dev/shm that no process uses any more."""
    room: int
    """Bytes free in the folder `where`."""
    writable: bool
    """Whether the folder `where` can be written."""
    where: str
    """The run directory, or the nearest existing folder above it."""


def look(transport: Transport, run_dir: Path, mpi_problem: str | None = None) -> MachineFacts:
    """The facts of this process, found out without changing anything."""
    import torch

    from axsparse.runtime.gpu.rank_gpus import visible_gpus
    from axsparse.runtime.mpi.mpi_transport import mpi_library, thread_level
    from axsparse.runtime.version import __version__

    where = run_dir.absolute()
    while not where.is_dir():
        where = where.parent
    has_mpi = transport.name != "local"
    gpus = visible_gpus()
    cupy, cupy_cuda, cupy_nccl = _cupy()
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MachineFacts(
        rank=transport.rank,
        size=transport.size,
        host=socket.gethostname(),
        python=platform.python_version(),
        axsparse=__version__,
        torch=torch.__version__,
        mpi=mpi_library() if has_mpi else None,
        mpi_problem=mpi_problem,
        thread_level=thread_level() if has_mpi else None,
        cuda=torch.version.cuda,
        gpus=[gpu.name for gpu in gpus],
        uuids=[gpu.uuid for gpu in gpus],
        nccl=".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        cupy=cupy,
        cupy_cuda=cupy_cuda,
        cupy_nccl=cupy_nccl,
        threads_wanted=os.environ.get("OMP_NUM_THREADS"),
        cores=sorted(os.sched_getaffinity(0)),
        locked_memory=None if lockable == resource.RLIM_INFINITY else lockable,
        infiniband=sorted(path.name for path in INFINIBAND.glob("*")),
        leftovers=leftovers(SHARED, PROCESSES),
        room=shutil.disk_usage(where).free,
        writable=os.access(where, os.W_OK | os.X_OK),
        where=str(where),
    )


def _cupy() -> tuple[str | None, str | None, str | None]:
    """The versions of CuPy, and of the CUDA and NCCL that it uses."""
    assert "torch" in sys.modules, "torch has to be imported first, so that both use its libnccl"
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


# --- findings ----------------------------------------------------------------------------

Ranks = Sequence[MachineFacts]
Hosts = dict[str, list[MachineFacts]]
"""The ranks of each host."""


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


def findings(ranks: Ranks) -> list[Finding]:
    """All findings, in the order in which they are printed; `ranks` is in rank order."""
    hosts = _by_host(ranks)
    return [
        _same("Python", ranks, lambda rank: rank.python),
        _same("axsparse", ranks, lambda rank: rank.axsparse),
        _same("torch", ranks, lambda rank: rank.torch),
        _mpi(ranks),
        _thread_level(ranks),
        _cuda(ranks),
        _same("NCCL", ranks, lambda rank: rank.nccl),
        _cupy_fits(ranks),
        _placement(ranks),
        _devices(hosts),
        _threads(hosts),
        _cores_for_gpus(hosts),
        _infiniband(hosts),
        _locked_memory(ranks),
        _shared_memory(hosts),
        _disk(hosts),
    ]


def device_map(ranks: Ranks) -> list[str]:
    """A line for each host with its ranks, and the device that each of them uses."""
    lines = []
    for host, neighbours in _by_host(ranks).items():
        devices = []
        for place, rank in enumerate(neighbours):
            # If the launcher showed this rank a single device only, that is its number 0.
            number = place % max(len(rank.gpus), 1)
            device = f"cuda:{number} ({rank.gpus[number]})" if rank.gpus else "cpu"
            devices.append(f"{rank.rank} → {device}")
        lines.append(f"host {host}: rank {', '.join(devices)}")
    return lines


def _print(concluded: Sequence[Finding], ranks: Ranks, *, as_json: bool) -> None:
    """Print findings and devices as lines, or everything as JSON."""
    if as_json:
        everything = {"findings": [*map(asdict, concluded)], "ranks": [*map(asdict, ranks)]}
        say(json.dumps(everything, indent=2))
    else:
        say("\n".join([*map(str, concluded), *(f"  {line}" for line in device_map(ranks))]))


def _by_host(ranks: Ranks) -> Hosts:
    hosts: Hosts = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return hosts


def _same(name: str, ranks: Ranks, value: Callable[[MachineFacts], str | None]) -> Finding:
    """Whether all ranks have the same value; if not, the first rank that differs is named."""
    values = [value(rank) for rank in ranks]
    common = max(values, key=values.count)
    for rank, its in zip(ranks, values, strict=True):
        if its != common:
            said = f"rank {rank.rank} on host {rank.host} has {its or 'none'}, others {common}"
            return Finding("wrong", name, said, "start all ranks from one environment")
    return Finding("ok" if common else "absent", name, common or "none")


def _mpi(ranks: Ranks) -> Finding:
    for rank in ranks:
        if rank.mpi_problem is not None:
            said, _, mend = rank.mpi_problem.removeprefix("MPI: ").partition("; ")
            return Finding("wrong", "MPI", said, mend)
    library = _same("MPI", ranks, lambda rank: rank.mpi)
    if library.mark == "absent":
        return Finding("absent", "MPI", "no library: one rank, by itself")
    return library


def _thread_level(ranks: Ranks) -> Finding:
    level = _same("MPI threads", ranks, lambda rank: rank.thread_level)
    if level.mark == "ok" and level.said != "multiple":
        mend = "take an MPI library with MPI_THREAD_MULTIPLE: a hang is ended sooner with it"
        return Finding("slow", level.name, level.said, mend)
    return level


def _cuda(ranks: Ranks) -> Finding:
    version = _same("CUDA", ranks, lambda rank: rank.cuda)
    if version.mark != "ok":
        return version
    counts = _same("CUDA", ranks, lambda rank: counted(len(rank.gpus), "device"))
    if counts.mark == "wrong":
        mend = "ask for the same number of GPUs on every node"
        return Finding("wrong", "CUDA", counts.said, mend)
    if not ranks[0].gpus:
        return Finding("absent", "CUDA", f"{version.said}, but no device")
    return Finding("ok", "CUDA", f"{version.said} · {', '.join(sorted(set(ranks[0].gpus)))}")


def _cupy_fits(ranks: Ranks) -> Finding:
    """Whether CuPy is there, takes torch's streams, and uses the same CUDA and NCCL as torch."""
    version = _same("CuPy", ranks, lambda rank: rank.cupy)
    cuda = _major(ranks[0].cuda)
    if version.mark == "absent" and ranks[0].gpus:
        mend = f"pip install cupy-cuda{cuda}x, as the extra cuda{cuda} does"
        if cuda is None:
            mend = "install CuPy's build for torch's ROCm"
        return Finding("wrong", "CuPy", "cannot be imported, and runs the kernels of GPUs", mend)
    if version.mark != "ok":
        return version
    if ranks[0].gpus and int(_major(version.said) or 0) < LEAST_CUPY:
        mend = f"pip install 'cupy-cuda{cuda}x>={LEAST_CUPY}'"
        return Finding("wrong", "CuPy", f"{version.said} cannot take torch's streams", mend)
    for rank in ranks:
        for library, cupys, torchs in (
            ("CUDA", _major(rank.cupy_cuda), _major(rank.cuda)),
            ("NCCL", rank.cupy_nccl, rank.nccl),
        ):
            if None not in (cupys, torchs) and cupys != torchs:
                return Finding(
                    "wrong",
                    "CuPy",
                    f"{version.said} with {library} {cupys}, torch with {library} {torchs}, on "
                    f"host {rank.host}",
                    f"install the CuPy wheel of CUDA {_major(rank.cuda)}, without an NCCL of its "
                    "own",
                )
    return version


def _major(version: str | None) -> str | None:
    return None if version is None else version.partition(".")[0]


def _placement(ranks: Ranks) -> Finding:
    """Whether neighbouring ranks share hosts: they are neighbouring stages, which send the most."""
    hosts = [rank.host for rank in ranks]
    changes = sum(one != other for one, other in itertools.pairwise(hosts))
    count = len(set(hosts))
    said = f"{counted(len(hosts), 'rank')} on {counted(count, 'host')}"
    if changes >= count:
        mend = "start with mpirun --map-by slot, mpirun -ppn N or srun --distribution=block"
        return Finding("wrong", "placement", f"{said}, neighbours on different hosts", mend)
    return Finding("ok", "placement", said)


def _devices(hosts: Hosts) -> Finding:
    for host, ranks in hosts.items():
        # A launcher may show each rank a different device as its first, so UUIDs are counted.
        gpus = len({uuid for rank in ranks for uuid in rank.uuids})
        if gpus and len(ranks) > gpus:
            said = f"{len(ranks)} ranks share {counted(gpus, 'GPU')} on host {host}"
            return Finding("slow", "devices", said, f"start {counted(gpus, 'rank')} there")
    gpus = len(next(iter(hosts.values()))[0].gpus)
    if gpus:
        return Finding("ok", "devices", f"{gpus} a rank to see")
    return Finding("absent", "devices", "no GPU: ranks compute on cores")


def _cores(ranks: Ranks) -> int:
    """How many cores the ranks of a host have together."""
    return len({core for rank in ranks for core in rank.cores})


def _threads(hosts: Hosts) -> Finding:
    """Whether each rank is told to compute with no more threads than its share of the cores."""
    for host, ranks in hosts.items():
        cores = _cores(ranks)
        where = f"{counted(len(ranks), 'rank')} on {counted(cores, 'core')} of host {host}"
        fair = max(1, cores // len(ranks))
        for rank in ranks:
            threads = rank.threads_wanted
            mend = "export OMP_NUM_THREADS=1"
            if threads is None and len(ranks) > 1:
                said = f"OMP_NUM_THREADS is not set, {where}: each takes all cores"
                return Finding("wrong", "threads", said, mend)
            if threads is not None and not (threads.isdigit() and int(threads)):
                said = f"OMP_NUM_THREADS is {threads!r}, no number of threads"
                return Finding("wrong", "threads", said, mend)
            if threads is not None and int(threads) > fair:
                said = f"OMP_NUM_THREADS is {threads}, {where}"
                return Finding("slow", "threads", said, f"export OMP_NUM_THREADS={fair}")
        if len(ranks) > cores:
            mend = "start fewer ranks there, or take the binding to cores off (--bind-to none)"
            return Finding("slow", "threads", where, mend)
    ranks = max(hosts.values(), key=len)
    said = f"{counted(len(ranks), 'rank')} on {counted(_cores(ranks), 'core')}"
    threads = next(iter(hosts.values()))[0].threads_wanted or "not set"
    return Finding("ok", "threads", f"OMP_NUM_THREADS {threads}, {said}")


def _cores_for_gpus(hosts: Hosts) -> Finding:
    """Whether what feeds a GPU has cores to run on."""
    shares = {h: _cores(ranks) / len(ranks) for h, ranks in hosts.items() if ranks[0].gpus}
    if not shares:
        return Finding("absent", "cores", "no GPU that would need some beside")
    host, least = min(shares.items(), key=lambda share: share[1])
    if least < LEAST_CORES:
        return Finding(
            "slow",
            "cores",
            f"{least:.3g} a rank with a GPU on host {host}",
            "ask for more: axsparse submit --cpus-per-rank 7, srun --cpus-per-task=7, or mpirun "
            "--bind-to none",
        )
    return Finding("ok", "cores", f"{least:.3g} a rank with a GPU")


def _infiniband(hosts: Hosts) -> Finding:
    devices = {host: ranks[0].infiniband for host, ranks in hosts.items()}
    having = [host for host, names in devices.items() if names]
    if not having:
        return Finding("absent", "InfiniBand", "no device")
    for host, names in devices.items():
        if not names:
            said = f"host {host} has no device, and host {having[0]} has"
            return Finding("slow", "InfiniBand", said, "leave that host out, or ask the site why")
    return Finding("ok", "InfiniBand", ", ".join(devices[having[0]]))


def _locked_memory(ranks: Ranks) -> Finding:
    """What `ulimit -l` allows; devices of InfiniBand read memory only once it is locked."""
    limits = [rank.locked_memory for rank in ranks if rank.locked_memory is not None]
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
    return Finding("ok", "locked memory", format_bytes(min(limits)) if limits else "no limit")


def _shared_memory(hosts: Hosts) -> Finding:
    """What earlier jobs left in memory, which the next job removes when it starts."""
    counts = {host: len(ranks[0].leftovers) for host, ranks in hosts.items() if ranks[0].leftovers}
    said = ", ".join(f"{counted(n, 'file')} on host {host}" for host, n in counts.items())
    if not said:
        return Finding("ok", "shared memory", "no leftovers")
    return Finding("ok", "shared memory", f"{said} of jobs that have ended; the next one clears up")


def _disk(hosts: Hosts) -> Finding:
    first = [ranks[0] for ranks in hosts.values()]
    for rank in first:
        if not rank.writable:
            said = f"{rank.where} on host {rank.host} cannot be written"
            return Finding("wrong", "disk", said, "choose another --run-dir")
        if rank.room < LEAST_ROOM:
            said = f"{format_bytes(rank.room)} free in {rank.where} on host {rank.host}"
            mend = f"make room for {format_bytes(LEAST_ROOM)} at least, or choose another --run-dir"
            return Finding("wrong", "disk", said, mend)
    return Finding("ok", "disk", f"{format_bytes(first[0].room)} free in {first[0].where}")
