"""One rank of one contender: python -m peers.rank RUN FOLDER, started by `launch.py`.

The rank trains a tiny model first, so that libraries, machine code and threads are there before
memory is measured. Then it trains, and writes what it measured to the folder.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from peers.workload import SIZES, Run

DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass
class Record:
    """The measurements of one rank; times are of the clock that all processes of a machine
    share."""

    ends: list[float] = field(default_factory=list)
    """When each step ended here."""
    cpu: list[float] = field(default_factory=list)
    """Seconds of CPU that this rank had used by then."""
    machine: list[float] = field(default_factory=list)
    """Seconds of CPU that the machine had used by then."""
    losses: list[Sequence[float]] = field(default_factory=list)
    """Of each step, the mean losses that this rank knows; empty where it knows none."""
    before: int = 0
    """Resident bytes before the model."""

    def start(self) -> None:
        """Begin to measure memory."""
        gc.collect()
        self.before = own_bytes("VmRSS")
        forget_peak()

    def end_step(self, losses: Sequence[float]) -> None:
        self.ends.append(time.monotonic())
        self.cpu.append(own_cpu_seconds())
        self.machine.append(machine_cpu_seconds())
        self.losses.append(losses)

    def save(self, path: Path, **more: object) -> None:
        found = {**vars(self), "peak": own_bytes("VmHWM"), "torch": torch.__version__, **more}
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(found), encoding="utf-8")
        whole.rename(path)


def tiny(run: Run) -> Run:
    """The same contender on a model that takes no memory, and is wide enough for compiled loops."""
    size = replace(SIZES["tiny"], microbatches=run.size.microbatches, blocks=run.size.blocks)
    return replace(run, size=size, warmup=0, steps=1)


def run_peer(run: Run, folder: Path) -> None:
    from torch import distributed

    from peers.contenders.contender import Seat, contender_module
    from peers.gpt import Stream

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        # A file, since a TCPStore would listen on all interfaces of the machine.
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
    start = contender_module(run.case).start
    first = tiny(run)
    start(Seat(first, rank, Stream(first.size, 1))).step(0)
    record = Record()
    seat = Seat(run, rank, Stream(run.size, run.all_steps))
    record.start()
    contender = start(seat)
    for number in range(run.all_steps):
        record.end_step(contender.step(number))
    record.save(folder / f"rank{rank}.json", tokens=seat.stream.digest)
    if world > 1:
        distributed.barrier()


def run_ours(run: Run, folder: Path) -> None:
    from peers.contenders.ours import train
    from peers.gpt import Stream

    rank = train(tiny(run), folder / "tiny", lambda _: None)
    record = Record()
    digest = Stream(run.size, run.all_steps).digest
    record.start()
    # Every rank knows the loss; rank 0's counts.
    train(run, folder / "run", lambda loss: record.end_step([] if rank else [loss]))
    record.save(folder / f"rank{rank}.json", tokens=digest)
    sys.exit()


def main() -> None:
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    run, folder = Run.from_text(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    if run.case.framework == "axsparse":
        run_ours(run, folder)
    run_peer(run, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    # The unloading of libraries is not measured.
    os._exit(0)


_TICKS = os.sysconf("SC_CLK_TCK")


def own_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def forget_peak() -> None:
    """Let VmHWM begin anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def machine_cpu_seconds() -> float:
    """Seconds that all cores together have worked, time that a host took from them included."""
    with Path("/proc/stat").open(encoding="utf-8") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    user, nice, system, _, _, interrupts, soft, stolen = fields
    return (user + nice + system + interrupts + soft + stolen) / _TICKS


if __name__ == "__main__":
    main()
