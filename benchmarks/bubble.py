"""The bubble of a uniform pipeline against eq. (6) of the paper, on emulated compute.

    for n in 2 3 4; do
      mpirun -n $n python benchmarks/bubble.py --save benchmarks/results/bubble.json
    done

Stages sleep 20 ms in a forward and 40 ms in a backward, 16 microbatches, default schedule
and slack; engine, policy and links are the package's own. A stage's bubble is the engine's
own phase and the wait from its last backward to that of the last stage to finish; mean over
the stages. Eq. (6) says (G_inter − 1) · (t_f + t_b) with the times of one stage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from emulated import emulate, machine
from mpi4py import MPI

from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.simulator import Durations
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.grid import Grid
from axsparse.runtime.mpi.mpi_transport import MpiTransport

FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040
MICROBATCHES = 16
SLACK = 1


def main() -> None:
    """Measure on the ranks of this job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    transport = MpiTransport(MPI.COMM_WORLD)
    g_inter = transport.size
    place = Grid(g_inter, 1).place(transport.rank)
    link = transport.link(place)
    durations = Durations.uniform(g_inter, MICROBATCHES, FORWARD_SECONDS, BACKWARD_SECONDS)
    policy = Schedule("message-driven", SLACK, "alternate").policy
    rows: list[list[float]] = []
    for repeat in range(arguments.repeats + 1):  # the first warms up
        step = emulate(transport, place, link, policy, durations, unit_seconds=1.0)
        seconds = step.phases
        own = [step.bubble, seconds["compute"], seconds["p2p"], seconds["other"], step.step]
        everyone = sum_by_owner(transport.world, transport.backoff, own)
        if repeat:
            rows.append([statistics.fmean(column) for column in zip(*everyone, strict=True)])
    transport.close()
    if place.rank != 0:
        return
    bubble, compute, p2p, other, whole = (statistics.median(c) for c in zip(*rows, strict=True))
    asked = (g_inter - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)
    # A sleep lasts longer than it was asked to; eq. (6) with the times that were taken.
    taken = (g_inter - 1) * compute / MICROBATCHES
    result = {
        "bubble_ms": round(1e3 * bubble, 2),
        "eq6_ms": round(1e3 * asked, 2),
        "eq6_with_measured_compute_ms": round(1e3 * taken, 2),
        "bubble_over_eq6": round(bubble / asked, 4),
        "bubble_over_eq6_with_measured_compute": round(bubble / taken, 4),
        "quartiles_of_bubble_ms": [
            round(1e3 * value, 2) for value in statistics.quantiles([row[0] for row in rows], n=4)
        ],
        "compute_ms": round(1e3 * compute, 2),
        "p2p_ms": round(1e3 * p2p, 2),
        "other_ms": round(1e3 * other, 2),
        "step_ms": round(1e3 * whole, 2),
        "repeats": arguments.repeats,
        "machine": machine(),
    }
    print(f"{g_inter} stages: {json.dumps(result)}")
    if arguments.save:
        found = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
        found[f"{g_inter} stages"] = result
        arguments.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
