"""How far plans are off: emulated devices, real steps of this machine, layouts, memory.

    python benchmarks/planner_accuracy.py emulated --json emulated.json
    python benchmarks/planner_accuracy.py real --json real.json

`emulated`: stages sleep instead of computing, everything else is the package's own. What one
stage and one pair of ranks take (P = 1, and a ping-pong) predicts pipelines of P = 2, 3, 4. On a
busy machine start it under `chrt --rr 5`. `real`: `axsparse calibrate` before and after; in
between real layouts of a GPT on two, three and four ranks. If the two calibrations differ by
more than 5 % in e, or runs of the same layout do in time, the result is `inconclusive`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from emulated import emulate, machine

from axsparse.grid import Grid
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import load_cluster
from axsparse.planner.cost import StageSeconds
from axsparse.planner.simulator import Durations, Edge, simulate
from axsparse.planner.step import durations

FORWARD, BACKWARD = 0.010, 0.020
"""Seconds of a stage that sleeps."""
MICROBATCHES = 12
JITTER = 0.1
STEPS = 5
DRIFT = 0.05
MODEL = ("model.hidden_size=256", "model.num_layers=6", "model.sequence_length=256")
BATCH = ("batch.global_batch_size=48", "precision=fp32", "train.eval_steps=0")
LAYOUTS = ((2, 1, 2), (1, 2, 2), (2, 1, 4), (1, 2, 4), (2, 1, 8), (1, 2, 8), (3, 1, 2), (4, 1, 2))
"""Stages, replicas, microbatch size."""


def emulated_rank() -> None:
    """One rank of an MPI job: all cases, one JSON line from rank 0."""
    from axsparse.transport import MpiTransport, connect

    transport = connect()
    assert isinstance(transport, MpiTransport), "start this under mpirun"
    place = Grid(transport.size, 1).place(transport.rank)
    link = transport.link(place)
    schedule = Schedule("message-driven", 1, "alternate")
    found = []
    for jitter in (0.0, JITTER):
        for step in range(STEPS):
            times = planned_durations(transport.size, jitter, step)
            seen = emulate(transport, place, link, schedule.policy, times, 1.0)
            found.append({"jitter": jitter, "step": step, "seconds": seen.step})
    if transport.rank == 0:
        print(json.dumps(found), flush=True)
    transport.close()


def planned_durations(stages: int, jitter: float, step: int) -> Durations:
    """The same on every rank and in the simulation."""
    costs = [StageSeconds(FORWARD, BACKWARD, 0.0)] * stages
    return durations(costs, MICROBATCHES, jitter, str(step))


def launch(ranks: int, arguments: Sequence[str], prefix: Sequence[str] = ()) -> str:
    """The output of an MPI job."""
    command = [*prefix, "mpirun", "-n", str(ranks), sys.executable, *arguments]
    done = subprocess.run(  # noqa: S603 - our own command
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AXSPARSE_PROGRESS": "plain"},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def emulated() -> dict[str, Any]:
    """Predicted against emulated; the only constant, a late waking, is read off P = 1."""
    runs = {p: json.loads(launch(p, [__file__, "--rank"])) for p in (1, 2, 3, 4)}
    late = [run["seconds"] - run_alone(run) for run in runs[1]]
    each = max(0.0, median(late) / (2 * MICROBATCHES))
    cases = []
    for stages in (2, 3, 4):
        for jitter in (0.0, JITTER):
            chosen = [run for run in runs[stages] if run["jitter"] == jitter]
            measured = median(run["seconds"] for run in chosen)
            predicted = median(
                simulated(planned_durations(stages, jitter, run["step"]), each) for run in chosen
            )
            cases.append(
                {
                    "stages": stages,
                    "jitter": jitter,
                    "measured": measured,
                    "predicted": predicted,
                    "error": predicted / measured - 1,
                }
            )
    errors = [abs(case["error"]) for case in cases]
    return {
        "late_waking_seconds": each,
        "cases": cases,
        "mean": fmean(errors),
        "most": max(errors),
        "target": {"mean": 0.03, "most": 0.06},
        "machine": machine(),
    }


def run_alone(run: dict[str, Any]) -> float:
    """What one stage should take."""
    times = planned_durations(1, run["jitter"], run["step"])
    return sum(times.forward[0]) + sum(times.backward[0])


def simulated(times: Durations, late: float) -> float:
    """Seconds of a pipeline whose sleepers wake `late`."""
    schedule = Schedule("message-driven", 1, "alternate")
    stages = len(times.forward)
    later = Durations(
        [[length + late for length in row] for row in times.forward],
        [[length + late for length in row] for row in times.backward],
    )
    run = simulate(
        lambda stage: schedule.policy(stage=stage, g_inter=stages, microbatches=MICROBATCHES),
        later,
        [Edge()] * (stages - 1),
    )
    return run.seconds


def real(steps: int) -> dict[str, Any]:
    """Layouts of a GPT as predicted by a calibration and as they ran."""
    with tempfile.TemporaryDirectory() as folder:
        before = calibrated(Path(folder) / "before.yaml")
        runs = [layout_run(Path(folder), before, *layout, steps=steps) for layout in LAYOUTS]
        after = calibrated(Path(folder) / "after.yaml")
        first, second = load_cluster(str(before)), load_cluster(str(after))
        rates = [cluster.efficiency * cluster.peak("fp32") for cluster in (first, second)]
    drift = abs(rates[1] / rates[0] - 1)
    two = [run for run in runs if run["ranks"] == 2]
    best = min(two, key=lambda run: run["predicted_seconds"])
    fastest = min(run["measured_seconds"] for run in two)
    return {
        "runs": runs,
        "error_two_ranks": max(abs(run["error"]) for run in two),
        "error_oversubscribed": max(abs(run["error"]) for run in runs if run["ranks"] > 2),
        "best_predicted_over_best_measured": best["measured_seconds"] / fastest,
        "memory_error": max(abs(run["memory_error"]) for run in runs),
        "drift": drift,
        "verdict": "inconclusive" if drift > DRIFT else "conclusive",
        "target": {"two": 0.05, "oversubscribed": 0.12, "ranking": 1.05, "memory": 0.10},
        "machine": machine(),
    }


def calibrated(path: Path) -> Path:
    """A cluster file of two ranks."""
    launch(2, ["-m", "axsparse", "calibrate", *settings(), "--out", str(path), "--steps", "6"])
    return path


def settings(*more: str) -> list[str]:
    chosen = (*MODEL, *BATCH, *more)
    return ["--config", "quickstart.yaml", *(part for key in chosen for part in ("--set", key))]


def layout_run(
    folder: Path, cluster: Path, stages: int, replicas: int, size: int, *, steps: int
) -> dict[str, Any]:
    """One layout: the record that training itself writes of plan and measurement."""
    ranks = stages * replicas
    own = settings(
        f"layout.g_inter={stages}",
        f"batch.microbatch_size={size}",
        f"layout.cluster={cluster}",
        "train.peak_flops=1e10",
        f"train.steps={steps}",
    )
    run_dir = folder / f"run-{stages}-{replicas}-{size}"
    launch(ranks, ["-m", "axsparse", "train", *own, "--run-dir", str(run_dir)])
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    [record] = [record for record in records if "predicted_step_seconds" in record]
    # Ranks beyond the cores share them: a step takes as much longer.
    share = max(1.0, ranks / (os.cpu_count() or 1))
    predicted = share * record["predicted_step_seconds"]
    measured = median(each["step_seconds"] for each in records[1:] if "loss" in each)
    memory = record["predicted_peak_memory_bytes"] / record["measured_peak_memory_bytes"]
    return {
        "stages": stages,
        "replicas": replicas,
        "microbatch_size": size,
        "ranks": ranks,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "error": predicted / measured - 1,
        "memory_error": memory - 1,
    }


def main() -> None:
    """Run one kind of cases and report it."""
    if sys.argv[1:] == ["--rank"]:
        emulated_rank()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["emulated", "real"])
    parser.add_argument("--steps", type=int, default=8, help="of each real run, at least 5")
    parser.add_argument("--json", type=Path, help="where the result goes beside the screen")
    arguments = parser.parse_args()
    result = emulated() if arguments.kind == "emulated" else real(arguments.steps)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
