"""Starts the ranks of one contender, waits for them, and joins what they measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.workload import Run

POLL_SECONDS = 0.05
STALL_SECONDS = 60.0
"""Without any CPU time of a peer's ranks after which they count as hung: some libraries lose a
message where they get no memory, and wait for it. axsparse has a watchdog."""
STALL_CPU_SECONDS = 2.0
LOOK_SECONDS = 5.0
GRACE_SECONDS = 2.0
"""For the other ranks to say what they have to say after one has failed."""
SHOWN_CHARACTERS = 3000
MAPPED_FROM = 2**20
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
"""Names the folder where torch compiles what DeepSpeed asks for."""
STACK_BYTES = 2 * 2**20
NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|out of memory|"
    r"can't start new thread|Resource temporarily unavailable|could not create a primitive",
    re.IGNORECASE,
)
BENCHMARKS = Path(__file__).parents[1]
CHECKOUT = BENCHMARKS.parent


@dataclass(frozen=True)
class Failure:
    """Why a contender did not get to its end."""

    reason: str
    output: str

    @property
    def is_memory(self) -> bool:
        return NO_MEMORY.search(self.output) is not None


def launch(run: Run, timeout: float) -> dict[str, Any] | Failure:
    """Run a contender in separate processes; the measures of its ranks, joined."""
    if run.case.framework == "deepspeed":
        forget_locks(Path(os.environ.get(EXTENSIONS, "nowhere")))
    with _folder() as folder:
        began = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with _small_stacks() if run.budget else contextlib.nullcontext():
                processes.extend(_start(run, folder))
            watched = [] if run.case.framework == "axsparse" else processes
            reason = _wait(processes, began + timeout, Stall(watched))
            if reason is not None:
                time.sleep(GRACE_SECONDS)
        finally:
            _end(processes)
        if reason is not None:
            return Failure(reason, _said(folder))
        rows = [
            json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(run.case.ranks)
        ]
        found = join(run, rows)
        found["start_seconds"] = round(min(row["ends"][0] for row in rows) - began, 3)
        return found


def forget_locks(extensions: Path) -> None:
    """Remove what a compilation that was killed has left: the next one would wait for it."""
    for lock in extensions.rglob("lock"):
        lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="axsparse-peers-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    """Start processes whose threads have stacks of 2 MiB in place of 8, all of which counts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def _environment(run: Run) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return given | {
        "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{CHECKOUT}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **({"MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM)} if run.mapped else {}),
    }


def _start(run: Run, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One process for each rank of a peer; ours has one launcher, which starts the ranks."""
    program = [sys.executable, "-m", "peers.rank", run.text(), str(folder)]
    ranks = run.case.ranks
    environment = _environment(run)
    if run.case.framework == "axsparse":
        mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
        commands = [[mpirun, "-n", str(ranks), *program]]
    else:
        commands = [program] * ranks
    for number, command in enumerate(commands):
        place = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(ranks),
            "MASTER_PORT": "0",
        }
        with (folder / f"output{number}").open("wb") as output:
            yield subprocess.Popen(  # noqa: S603
                command,
                env=environment | place,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )


class Stall:
    """Finds out when processes have used next to no CPU time for `STALL_SECONDS`."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._sessions = {process.pid for process in processes}
        self._since = self._looked = time.monotonic()
        self._cpu: dict[int, float] = {}

    def is_there(self) -> bool:
        now = time.monotonic()
        if not self._sessions or now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        cpu = cpu_seconds(self._sessions)
        # A compiler that a rank starts works for it.
        worked = sum(seconds - self._cpu.get(process, 0.0) for process, seconds in cpu.items())
        if worked > STALL_CPU_SECONDS:
            self._since, self._cpu = now, cpu
        return now - self._since > STALL_SECONDS


def cpu_seconds(sessions: set[int]) -> dict[int, float]:
    """CPU seconds of every process that belongs to one of these sessions."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) in sessions:
            ticks = int(fields[11]) + int(fields[12])
            found[int(path.parent.name)] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float, stall: Stall
) -> str | None:
    """None once all have ended well, else what went wrong first."""
    while True:
        codes = [process.poll() for process in processes]
        for number, code in enumerate(codes):
            if code not in (None, 0):
                return f"process {number} ended with {code}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return "took longer than its limit"
        if stall.is_there():
            return f"hung: no rank computed for {STALL_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the remaining processes, and all that they have started; each leads a separate
    session."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _said(folder: Path) -> str:
    """The end of what each process printed."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]
        for path in sorted(folder.glob("output*"))
    ]
    return "\n".join(text for text in texts if text.strip())


def join(run: Run, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measures of one run from the measures of its ranks.

    A step ends when it has ended on the last rank, and takes the time between two such ends.
    """
    ends = [max(moments) for moments in zip(*(row["ends"] for row in rows), strict=True)]
    first, last = run.warmup - 1, run.all_steps - 1
    seconds = [ends[step] - ends[step - 1] for step in range(run.warmup, run.all_steps)]
    cpu = sum(row["cpu"][last] - row["cpu"][first] for row in rows)
    wall = ends[last] - ends[first]
    machine = rows[0]["machine"][last] - rows[0]["machine"][first]
    losses = [
        statistics.fmean(loss for row in rows for loss in row["losses"][step])
        for step in range(run.all_steps)
    ]
    return {
        "seconds": [round(value, 5) for value in seconds],
        "median_seconds": statistics.median(seconds),
        "cpu_seconds": round(cpu / len(seconds), 4),
        "foreign_share": round(max(0.0, machine - cpu) / (wall * (os.cpu_count() or 1)), 3),
        "losses": losses,
        "peak_bytes": [row["peak"] for row in rows],
        "peak_bytes_above_libraries": [row["peak"] - row["before"] for row in rows],
        "tokens": rows[0]["tokens"],
        "torch": rows[0]["torch"],
    }
