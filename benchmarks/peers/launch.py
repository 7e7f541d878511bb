"""Starts the ranks of one contender, waits for them, and joins what they measured."""

from __future__ import annotations

import contextlib
import json
import os
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
GRACE_SECONDS = 2.0
"""For the other ranks to say what they have to say after one has failed."""
SHOWN_CHARACTERS = 3000
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
"""Names the folder where torch compiles what DeepSpeed asks for."""
BENCHMARKS = Path(__file__).parents[1]
CHECKOUT = BENCHMARKS.parent


@dataclass(frozen=True)
class Failure:
    """Why a contender did not get to its end."""

    reason: str
    output: str


def launch(run: Run, timeout: float) -> dict[str, Any] | Failure:
    """Run a contender in separate processes; the measures of its ranks, joined."""
    if run.case.framework == "deepspeed":
        forget_locks(Path(os.environ.get(EXTENSIONS, "nowhere")))
    with tempfile.TemporaryDirectory(prefix="axsparse-peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        began = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes.extend(_start(run, folder))
            reason = _wait(processes, began + timeout)
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


def _environment() -> dict[str, str]:
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
    }


def _start(run: Run, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One process for each rank of a peer; ours has one launcher, which starts the ranks."""
    program = [sys.executable, "-m", "peers.rank", run.text(), str(folder)]
    ranks = run.case.ranks
    environment = _environment()
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


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str | None:
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
