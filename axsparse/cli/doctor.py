"""`axsparse doctor`: checks whether a machine, or all ranks of a launcher, can train."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from axsparse.cli.parser import CommandParser, say
from axsparse.config.section import counted
from axsparse.runtime import process
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import EXIT_INTERNAL, ConfigError, OutputError

DESCRIPTION = """\
Check whether this machine is fit for training; under a launcher, whether all ranks are.

  axsparse doctor
  mpirun -n 4 axsparse doctor --run-dir /scratch/me/run

✓ is well, ✗ is wrong, ! works but is slow.
"""
OK, WRONG, SLOW = "✓", "✗", "!"
LEAST_CORES = 4  # that feed a GPU: Python, fetching batches, NCCL and torch
LEAST_CUPY = 14  # the first that takes torch's streams
LEAST_BYTES = 10**9  # of memory for a rank, and of space in the run directory
SAME = ("Python", "axsparse", "torch", "MPI", "CUDA", "CuPy")  # on all ranks
Facts = dict[str, Any]  # of one rank, by the names that `look` gives


def parser() -> CommandParser:
    codes = "exit codes:\n  0 nothing is wrong   1 something is   78 arguments that cannot be run\n"
    arguments = CommandParser(prog="axsparse doctor", description=DESCRIPTION, epilog=codes)
    arguments.add_argument("--run-dir", type=Path, default="runs", help="where runs will write")
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Examine, print, and end the process; all ranks of a launcher call this together."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGINT, process.leave_at_interrupt)
    # Imported late, so that --help loads neither torch nor MPI.
    from axsparse.runtime.connection import connect
    from axsparse.runtime.exchange import gather_values
    from axsparse.runtime.local.local_transport import LocalTransport

    problem = None
    try:
        transport = connect()
    except ConfigError as error:
        # The ranks cannot connect, so that each looks at itself and only the first one prints.
        transport, problem = LocalTransport(), str(error)
    try:
        facts = {"rank": transport.rank, "problem": problem, **look(arguments.run_dir)}
        all_facts = gather_values(transport, facts)
    except Exception as failure:  # any failure has to end the other ranks, which wait
        process.write_line(f"error: doctor: rank {transport.rank}: {failure}")
        transport.abort(EXIT_INTERNAL)
    lines = [*findings(all_facts)]
    prints = transport.rank == 0 and (process.speaks() or problem is None)
    transport.close()
    try:
        if prints:
            say("\n".join(lines))
    except OutputError as error:
        process.exit_process(error.exit_code, f"error: {error}")
    process.exit_process(int(any(line.startswith(WRONG) for line in lines)))


def look(run_dir: Path) -> Facts:
    """The facts of this process's machine."""
    import torch

    from axsparse.runtime.gpu.rank_gpus import visible_gpus
    from axsparse.runtime.machine import host_memory_bytes
    from axsparse.runtime.mpi.mpi_transport import mpi_library
    from axsparse.runtime.provenance import __version__

    above = (run_dir.absolute(), *run_dir.absolute().parents)
    where = next(path for path in above if os.path.lexists(path))
    is_open = where.is_dir() and os.access(where, os.W_OK | os.X_OK)
    own, first = Path(sys.executable).with_name("mpirun"), shutil.which("mpirun")
    gpus, cupy = visible_gpus(), None
    with contextlib.suppress(Exception):  # CuPy's own errors have no common base
        cupy = str(importlib.import_module("cupy").__version__) if gpus else None
    return {
        **{"host": platform.node(), "Python": platform.python_version(), "CuPy": cupy},
        **{"axsparse": __version__, "torch": torch.__version__, "CUDA": torch.version.cuda},
        "MPI": mpi_library() if "mpi4py.MPI" in sys.modules else None,
        "wheels": process.installed_mpi(),
        "mpirun": first if own.exists() and first and Path(first) != own else None,
        "uuids": [gpu.uuid for gpu in gpus],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "cores": sorted(os.sched_getaffinity(0)),
        **{"where": str(where), "memory": host_memory_bytes()},
        "room": shutil.disk_usage(where).free if is_open else 0,
    }


def findings(ranks: Sequence[Facts]) -> Iterator[str]:
    """The lines of the report, with a suggestion for each wrong or slow value."""
    first, hosts = ranks[0], [rank["host"] for rank in ranks]
    yield f"{OK} versions: {', '.join(f'{name} {first[name]}' for name in SAME if first[name])}"
    for rank, name in itertools.product(ranks, SAME):
        if rank[name] != first[name]:
            said = f"rank {rank['rank']} on host {rank['host']} has {rank[name]}, rank 0"
            yield f"{WRONG} {name}: {said} {first[name]} → start all ranks from one environment"
    if first["problem"] is not None:
        said, _, suggestion = first["problem"].removeprefix("MPI: ").partition("; ")
        yield f"{WRONG} MPI: {said} → {suggestion}"
    if first["mpirun"]:
        yield f"{SLOW} MPI: {first['mpirun']} is not the environment's → take the mpirun there"
    if len(first["wheels"]) > 1:
        yield f"{WRONG} MPI: {' and '.join(first['wheels'])} → pip uninstall all but one"
    if process.are_scattered(hosts):
        yield f"{WRONG} placement: neighbouring ranks on different hosts → {process.BLOCKS}"
    for host in dict.fromkeys(hosts):
        yield from _of_host(host, [rank for rank in ranks if rank["host"] == host])


def _of_host(host: str, here: Sequence[Facts]) -> Iterator[str]:
    first, count = here[0], counted(len(here), "rank")
    cores = len({core for rank in here for core in rank["cores"]})
    gpus = len({uuid for rank in here for uuid in rank["uuids"]})
    fair, major = max(1, cores // len(here)), str(first["CuPy"]).partition(".")[0]
    yield f"{OK} host {host}: {count} on {counted(gpus, 'GPU')} and {counted(cores, 'core')}"
    if gpus and not (major.isdigit() and int(major) >= LEAST_CUPY):
        suggestion = f"pip install 'cupy-cuda{str(first['CUDA']).partition('.')[0]}x>={LEAST_CUPY}'"
        found = first["CuPy"] or "not there"
        yield f"{WRONG} CuPy: {found}, and runs the kernels of GPUs → {suggestion}"
    if 0 < gpus < len(here):
        yield f"{SLOW} devices: {count} share {counted(gpus, 'GPU')} → start {gpus} there"
    if first["threads"] not in (None, *map(str, range(1, fair + 1))):
        yield f"{SLOW} threads: OMP_NUM_THREADS is {first['threads']} → set it to {fair}"
    if cores < len(here) * (LEAST_CORES if gpus else 1):
        yield f"{SLOW} cores: {cores} for {count} → ask for more, start fewer, or --bind-to none"
    if first["memory"] < len(here) * LEAST_BYTES:
        yield f"{SLOW} memory: {format_bytes(first['memory'])} for {count} → start fewer there"
    if first["room"] < LEAST_BYTES:
        room = f"{format_bytes(first['room'])} free" if first["room"] else "cannot be written"
        yield f"{WRONG} disk: {room}, {first['where']} → make room, or another --run-dir"
