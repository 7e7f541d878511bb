"""Benchmarks of `make bench` on several ranks: sums over replicas, and the bubble of a pipeline.

    mpirun -n 2 python benchmarks/on_ranks.py {sums,bubble}

`sums`: the time to sum fp32 gradients over replicas, over MPI_Allreduce's in the same round. Ours
adds in the order of the replicas, so that the bits are the same on every rank and in every run; MPI
adds as it likes.

`bubble`: stages sleep 20 ms in a forward and 40 ms in a backward; engine, policy and links are the
package's own. A stage's bubble is the engine's own phase and the wait from its last backward to the
last of all stages; the mean over the stages. Eq. (6) of AxoNN's paper says (G_inter − 1) · (t_f +
t_b).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from mpi4py import MPI

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.policy import Schedule
from axsparse.runtime.communication import Op, wait
from axsparse.runtime.grid import Grid
from axsparse.runtime.mpi.mpi_transport import MpiTransport

ENTRIES = 4 * 2**20
FORWARD_SECONDS, BACKWARD_SECONDS, MICROBATCHES = 0.020, 0.040, 16


def sums(transport: MpiTransport, rounds: int) -> dict[str, Any]:
    """Seconds of a sum over all ranks, ours and MPI's in turn."""
    group = transport.collective("replicas", range(transport.size))
    gradient = torch.zeros(ENTRIES)
    array = gradient.numpy()

    def seconds(call: Callable[[], object]) -> float:
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        call()
        MPI.COMM_WORLD.Barrier()
        return time.perf_counter() - began

    rows = []
    for number in range(-2, rounds):  # two to warm up
        ours = seconds(lambda: wait(group.start(Op.ALL_REDUCE, gradient), transport.backoff))
        mpi = seconds(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array))
        if number >= 0:
            rows.append([ours, mpi])
    return {"to_mpi_allreduce": [round(ours / mpi, 4) for ours, mpi in rows]}


class SleepingStage:
    """Takes the place of `pipeline.stage.Stage`: sleeps, and sends a scalar."""

    def forward(self, *_: object) -> tuple[torch.Tensor, ...]:
        time.sleep(FORWARD_SECONDS)
        return (torch.zeros(()),)

    def backward(self, *_: object) -> list[torch.Tensor | None]:
        time.sleep(BACKWARD_SECONDS)
        return [torch.zeros(())]


def bubble(transport: MpiTransport, rounds: int) -> dict[str, Any]:
    """Milliseconds of waiting in a step."""
    coords = Grid(transport.size, 1).coords(transport.rank)
    phases = Phases()
    stage: Any = SleepingStage()
    engine = Engine(
        Rank(coords, transport.backoff, phases),
        stage,
        transport.link(coords),
        schedule=Schedule("message-driven", 1),
        while_idle=lambda: None,
    )
    batch = Batch(0, tuple(Microbatch((), None, n, 1) for n in range(MICROBATCHES)), num_targets=1)
    found = []
    for number in range(-1, rounds):  # one to warm up
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        phases.begin_step()
        engine.train(batch, 1.0, 1.0, lambda _: None)
        seconds = phases.end_step()
        taken = time.perf_counter() - began
        longest = MPI.COMM_WORLD.allreduce(taken, MPI.MAX)
        waited = MPI.COMM_WORLD.allreduce(seconds["bubble"] + longest - taken)
        if number >= 0:
            found.append(1e3 * waited / transport.size)
    return {"bubble_ms": [round(value, 2) for value in found]}


def main() -> None:
    """Measure on the ranks of this job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["sums", "bubble"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transport = MpiTransport(MPI.COMM_WORLD)
    measure = {"sums": sums, "bubble": bubble}[arguments.what]
    found = measure(transport, arguments.rounds)
    if transport.rank == 0:
        print(json.dumps(found))
    transport.close()


if __name__ == "__main__":
    main()
