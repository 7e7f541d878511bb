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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

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
"""Where the kernel shows its InfiniBand devices, and others that are used like them."""
Facts = dict[str, Any]
"""What one rank sees of its machine, by the names that `look` gives."""
Ranks = Sequence[Facts]
"""The facts of all ranks, in rank order."""
Verdict = tuple[Mark, str, str]
"""A mark, what is said, and what to do about it if it is wrong or slow."""


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
        facts = json.dumps(look(transport, arguments.run_dir, problem))
        texts = gather_texts(transport.world, transport.backoff, facts)
    except Exception as failure:  # any failure has to end the other ranks, which wait
        write_line(f"error: doctor: rank {transport.rank}: {failure}")
        transport.abort(EXIT_INTERNAL)
    ranks = [json.loads(text) for text in texts]
    concluded = findings(ranks)
    if transport.rank == 0 and (speaks() or problem is None):
        everything = {"findings": [*map(asdict, concluded)], "ranks": ranks}
        lines = [*map(str, concluded), *(f"  {line}" for line in device_map(ranks))]
        say(json.dumps(everything, indent=2) if arguments.json else "\n".join(lines))
    transport.close()
    exit_process(EXIT_WRONG if any(finding.mark == "wrong" for finding in concluded) else 0)


# --- facts -------------------------------------------------------------------------------


def look(transport: Transport, run_dir: Path, mpi_problem: str | None = None) -> Facts:
    """The facts of this process, found out without changing anything; None for what it has not.

    `mpi_problem` says why MPI cannot be used, or does not agree with the launcher.
    """
    import torch

    from axsparse.runtime.gpu.rank_gpus import visible_gpus
    from axsparse.runtime.mpi.mpi_transport import mpi_library, thread_level
    from axsparse.runtime.version import __version__

    where = run_dir.absolute()
    while not where.is_dir():
        where = where.parent
    has_mpi = transport.name != "local"
    gpus = visible_gpus()
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "rank": transport.rank,
        "size": transport.size,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "axsparse": __version__,
        "torch": torch.__version__,
        "mpi": mpi_library() if has_mpi else None,
        "mpi_problem": mpi_problem,
        "thread_level": thread_level() if has_mpi else None,
        # The version that torch was built for.
        "cuda": torch.version.cuda,
        # Names and UUIDs of the devices that this rank may use, in torch's order; a UUID names a
        # device alike on all ranks.
        "gpus": [gpu.name for gpu in gpus],
        "uuids": [gpu.uuid for gpu in gpus],
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        **_cupy(),
        "threads_wanted": os.environ.get("OMP_NUM_THREADS"),
        # The cores that this rank may run on.
        "cores": sorted(os.sched_getaffinity(0)),
        # Bytes that this process may lock, `ulimit -l`; None without a limit.
        "locked_memory": None if lockable == resource.RLIM_INFINITY else lockable,
        "infiniband": sorted(path.name for path in INFINIBAND.glob("*")),
        # Files in /dev/shm that no process uses any more.
        "leftovers": leftovers(SHARED, PROCESSES),
        # The run directory, or the nearest existing folder above it, and the bytes free there.
        "where": str(where),
        "writable": os.access(where, os.W_OK | os.X_OK),
        "room": shutil.disk_usage(where).free,
    }


def _cupy() -> Facts:
    """The versions of CuPy, and of the CUDA and NCCL that it uses."""
    assert "torch" in sys.modules, "torch has to be imported first, so that both use its libnccl"
    versions: Facts = {"cupy": None, "cupy_cuda": None, "cupy_nccl": None}
    # CuPy's own errors have no common base. What it has told before one counts.
    with contextlib.suppress(Exception):
        cupy = importlib.import_module("cupy")
        versions["cupy"] = str(cupy.__version__)
        number = cupy.cuda.runtime.runtimeGetVersion()
        versions["cupy_cuda"] = f"{number // 1000}.{number % 1000 // 10}"
        number = importlib.import_module("cupy.cuda.nccl").get_version()
        versions["cupy_nccl"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return versions


# --- findings ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    mark: Mark
    said: str
    mend: str = ""
    """What to do about it, if it is wrong or slow."""

    def __str__(self) -> str:
        mend = f" → {self.mend}" if self.mend else ""
        return f"{SIGNS[self.mark]} {self.name:14} {self.said}{mend}"


def findings(ranks: Ranks) -> list[Finding]:
    """All findings, in the order in which they are printed."""
    return [Finding(name, *next(check(ranks))) for name, check in CHECKS.items()]


def device_map(ranks: Ranks) -> Iterator[str]:
    """A line for each host with its ranks, and the device that each of them uses."""
    for host, neighbours in _by_host(ranks).items():
        devices = []
        for place, rank in enumerate(neighbours):
            # If the launcher showed this rank a single device only, that is its number 0.
            number = place % max(len(rank["gpus"]), 1)
            device = f"cuda:{number} ({rank['gpus'][number]})" if rank["gpus"] else "cpu"
            devices.append(f"{rank['rank']} → {device}")
        yield f"host {host}: rank {', '.join(devices)}"


# Each check below yields what is wrong or slow, and at last what is said if nothing is. Only the
# first that a check yields counts.


def _by_host(ranks: Ranks) -> dict[str, list[Facts]]:
    hosts: dict[str, list[Facts]] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], []).append(rank)
    return hosts


def _differing(
    ranks: Ranks,
    value: Callable[[Facts], str | None],
    mend: str = "start all ranks from one environment",
) -> Iterator[Verdict]:
    """Wrong if not all ranks have the same value; the first rank that differs is named."""
    values = [value(rank) for rank in ranks]
    common = max(values, key=values.count)
    for rank, its in zip(ranks, values, strict=True):
        if its != common:
            said = f"rank {rank['rank']} on host {rank['host']} has {its or 'none'}"
            yield "wrong", f"{said}, others {common}", mend


def _version(fact: str, ranks: Ranks, without: str = "none") -> Iterator[Verdict]:
    """Whether all ranks have the same version of something."""
    yield from _differing(ranks, lambda rank: rank[fact])
    version = ranks[0][fact]
    yield ("ok", version, "") if version else ("absent", without, "")


def _mpi(ranks: Ranks) -> Iterator[Verdict]:
    for rank in ranks:
        if rank["mpi_problem"] is not None:
            said, _, mend = rank["mpi_problem"].removeprefix("MPI: ").partition("; ")
            yield "wrong", said, mend
    yield from _version("mpi", ranks, without="no library: one rank, by itself")


def _thread_level(ranks: Ranks) -> Iterator[Verdict]:
    level = ranks[0]["thread_level"]
    yield from _differing(ranks, lambda rank: rank["thread_level"])
    if level not in (None, "multiple"):
        mend = "take an MPI library with MPI_THREAD_MULTIPLE: a hang is ended sooner with it"
        yield "slow", level, mend
    yield from _version("thread_level", ranks)


def _cuda(ranks: Ranks) -> Iterator[Verdict]:
    cuda, gpus = ranks[0]["cuda"], ranks[0]["gpus"]
    yield from _differing(ranks, lambda rank: rank["cuda"])
    mend = "ask for the same number of GPUs on every node"
    yield from _differing(ranks, lambda rank: counted(len(rank["gpus"]), "device"), mend)
    if cuda and gpus:
        yield "ok", f"{cuda} · {', '.join(sorted(set(gpus)))}", ""
    yield "absent", f"{cuda}, but no device" if cuda else "none", ""


def _cupy_fits(ranks: Ranks) -> Iterator[Verdict]:
    """Whether CuPy is there, takes torch's streams, and uses the same CUDA and NCCL as torch."""
    version, cuda, gpus = ranks[0]["cupy"], _major(ranks[0]["cuda"]), ranks[0]["gpus"]
    yield from _differing(ranks, lambda rank: rank["cupy"])
    if gpus and version is None:
        wheel = f"pip install cupy-cuda{cuda}x, as the extra cuda{cuda} does"
        mend = "install CuPy's build for torch's ROCm" if cuda is None else wheel
        yield "wrong", "cannot be imported, and runs the kernels of GPUs", mend
    if gpus and int(_major(version) or 0) < LEAST_CUPY:
        mend = f"pip install 'cupy-cuda{cuda}x>={LEAST_CUPY}'"
        yield "wrong", f"{version} cannot take torch's streams", mend
    for rank in ranks:
        for library, cupys, torchs in (
            ("CUDA", _major(rank["cupy_cuda"]), _major(rank["cuda"])),
            ("NCCL", rank["cupy_nccl"], rank["nccl"]),
        ):
            if None not in (cupys, torchs) and cupys != torchs:
                said = f"{version} with {library} {cupys}, torch with {library} {torchs}"
                mend = f"install the CuPy wheel of CUDA {_major(rank['cuda'])}, without an NCCL"
                yield "wrong", f"{said}, on host {rank['host']}", f"{mend} of its own"
    yield from _version("cupy", ranks)


def _major(version: str | None) -> str | None:
    return None if version is None else version.partition(".")[0]


def _placement(ranks: Ranks) -> Iterator[Verdict]:
    """Whether neighbouring ranks share hosts: they are neighbouring stages, which send the most."""
    hosts = [rank["host"] for rank in ranks]
    count = len(set(hosts))
    said = f"{counted(len(hosts), 'rank')} on {counted(count, 'host')}"
    if sum(one != other for one, other in itertools.pairwise(hosts)) >= count:
        mend = "start with mpirun --map-by slot, mpirun -ppn N or srun --distribution=block"
        yield "wrong", f"{said}, neighbours on different hosts", mend
    yield "ok", said, ""


def _devices(ranks: Ranks) -> Iterator[Verdict]:
    for host, here in _by_host(ranks).items():
        # A launcher may show each rank a different device as its first, so UUIDs are counted.
        gpus = len({uuid for rank in here for uuid in rank["uuids"]})
        if gpus and len(here) > gpus:
            said = f"{len(here)} ranks share {counted(gpus, 'GPU')} on host {host}"
            yield "slow", said, f"start {counted(gpus, 'rank')} there"
    if ranks[0]["gpus"]:
        yield "ok", f"{len(ranks[0]['gpus'])} a rank to see", ""
    yield "absent", "no GPU: ranks compute on cores", ""


def _cores(ranks: Ranks) -> int:
    """How many cores the ranks of a host have together."""
    return len({core for rank in ranks for core in rank["cores"]})


def _threads(ranks: Ranks) -> Iterator[Verdict]:
    """Whether each rank is told to compute with no more threads than its share of the cores."""
    hosts = _by_host(ranks)
    for host, here in hosts.items():
        cores = _cores(here)
        where = f"{counted(len(here), 'rank')} on {counted(cores, 'core')} of host {host}"
        fair = max(1, cores // len(here))
        for threads in (rank["threads_wanted"] for rank in here):
            mend = "export OMP_NUM_THREADS=1"
            if threads is None and len(here) > 1:
                said = f"OMP_NUM_THREADS is not set, {where}: each takes all cores"
                yield "wrong", said, mend
            if threads is None:
                continue
            if not (threads.isdigit() and int(threads)):
                yield "wrong", f"OMP_NUM_THREADS is {threads!r}, no number of threads", mend
            if int(threads) > fair:
                said = f"OMP_NUM_THREADS is {threads}, {where}"
                yield "slow", said, f"export OMP_NUM_THREADS={fair}"
        if len(here) > cores:
            mend = "start fewer ranks there, or take the binding to cores off (--bind-to none)"
            yield "slow", where, mend
    fullest = max(hosts.values(), key=len)
    said = f"{counted(len(fullest), 'rank')} on {counted(_cores(fullest), 'core')}"
    yield "ok", f"OMP_NUM_THREADS {ranks[0]['threads_wanted'] or 'not set'}, {said}", ""


def _cores_for_gpus(ranks: Ranks) -> Iterator[Verdict]:
    """Whether what feeds a GPU has cores to run on."""
    hosts = _by_host(ranks).items()
    shares = {host: _cores(here) / len(here) for host, here in hosts if here[0]["gpus"]}
    if not shares:
        yield "absent", "no GPU that would need some beside", ""
    host, least = min(shares.items(), key=lambda share: share[1])
    if least < LEAST_CORES:
        options = "axsparse submit --cpus-per-rank 7, srun --cpus-per-task=7, or mpirun"
        said = f"{least:.3g} a rank with a GPU on host {host}"
        yield "slow", said, f"ask for more: {options} --bind-to none"
    yield "ok", f"{least:.3g} a rank with a GPU", ""


def _infiniband(ranks: Ranks) -> Iterator[Verdict]:
    having = next((rank for rank in ranks if rank["infiniband"]), None)
    if having is None:
        yield "absent", "no device", ""
        return
    for rank in ranks:
        if not rank["infiniband"]:
            said = f"host {rank['host']} has no device, and host {having['host']} has"
            yield "slow", said, "leave that host out, or ask the site why"
    yield "ok", ", ".join(having["infiniband"]), ""


def _locked_memory(ranks: Ranks) -> Iterator[Verdict]:
    """What `ulimit -l` allows; devices of InfiniBand read memory only once it is locked."""
    limited = [rank for rank in ranks if rank["locked_memory"] is not None]
    for rank in limited:
        if rank["locked_memory"] < LEAST_LOCKED and rank["infiniband"]:
            limit = format_bytes(rank["locked_memory"])
            said = f"{limit} on rank {rank['rank']} of host {rank['host']}, too little"
            mend = "ulimit -l unlimited before the launcher, or have the site set it for jobs"
            yield "slow", f"{said} for InfiniBand", mend
    limits = [rank["locked_memory"] for rank in limited]
    yield "ok", format_bytes(min(limits)) if limits else "no limit", ""


def _shared_memory(ranks: Ranks) -> Iterator[Verdict]:
    """What earlier jobs left in memory, which the next job removes when it starts."""
    counts = {host: len(here[0]["leftovers"]) for host, here in _by_host(ranks).items()}
    said = ", ".join(f"{counted(n, 'file')} on host {host}" for host, n in counts.items() if n)
    after = " of jobs that have ended; the next one clears up"
    yield "ok", f"{said}{after}" if said else "no leftovers", ""


def _disk(ranks: Ranks) -> Iterator[Verdict]:
    for rank in ranks:
        where = f"{rank['where']} on host {rank['host']}"
        if not rank["writable"]:
            yield "wrong", f"{where} cannot be written", "choose another --run-dir"
        if rank["room"] < LEAST_ROOM:
            mend = f"make room for {format_bytes(LEAST_ROOM)} at least, or choose another --run-dir"
            yield "wrong", f"{format_bytes(rank['room'])} free in {where}", mend
    yield "ok", f"{format_bytes(ranks[0]['room'])} free in {ranks[0]['where']}", ""


CHECKS: Mapping[str, Callable[[Ranks], Iterator[Verdict]]] = {
    "Python": partial(_version, "python"),
    "axsparse": partial(_version, "axsparse"),
    "torch": partial(_version, "torch"),
    "MPI": _mpi,
    "MPI threads": _thread_level,
    "CUDA": _cuda,
    "NCCL": partial(_version, "nccl"),
    "CuPy": _cupy_fits,
    "placement": _placement,
    "devices": _devices,
    "threads": _threads,
    "cores": _cores_for_gpus,
    "InfiniBand": _infiniband,
    "locked memory": _locked_memory,
    "shared memory": _shared_memory,
    "disk": _disk,
}
"""The checks by the names of their lines, in the order of the report."""
