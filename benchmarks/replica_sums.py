"""Time to sum gradients over replicas, ours against MPI_Allreduce of the same buffer, in turn.

    mpirun -n 2 python benchmarks/replica_sums.py [--save FILE]

Ours adds in the order of the replicas, so that the bits are the same on every rank and in every
run; MPI adds as it likes. Reported are the ratios within rounds, for fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from mpi4py import MPI

from axsparse.runtime.communication import Op, wait
from axsparse.runtime.mpi.mpi_transport import MpiTransport

ENTRIES = 4 * 2**20


def main() -> None:
    """Measure on the ranks of this job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transport = MpiTransport(MPI.COMM_WORLD)
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
    for number in range(-2, arguments.rounds):  # two to warm up
        ours = seconds(lambda: wait(group.start(Op.ALL_REDUCE, gradient), transport.backoff))
        mpi = seconds(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array))
        if number >= 0:
            rows.append([ours, mpi])
    if transport.rank == 0:
        found = {
            "ranks": transport.size,
            "megabytes": gradient.nbytes / 1e6,
            "milliseconds": [round(1e3 * ours, 3) for ours, _ in rows],
            "to_mpi_allreduce": [round(ours / mpi, 4) for ours, mpi in rows],
        }
        print(json.dumps(found))
        if arguments.save:
            arguments.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    transport.close()


if __name__ == "__main__":
    main()
