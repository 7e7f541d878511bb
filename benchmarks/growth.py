"""How time, memory and messages of training grow with the model and with the ranks.

    make bench-growth                # or: python benchmarks/growth.py [--curves NAME ...]

Curves: a step over depth (2–16 blocks), width (256–1,024), microbatches (1–32), stages and
replicas (1–8 ranks, the same work in all); the start of a job over ranks, under mpirun (1–32)
and in one process (8–512). One quantity changes at a time, and SAMO at 90 % is what trains.

For each quantity two exponents are fitted: over the whole curve (log of the figure by log of x,
least squares) and over its last doubling, where constant parts count least. A last exponent
above what the arithmetic asks for, which the table names, by more than 0.2 stands out. With
stages and replicas the work stays the same, so that all above 0 is overhead; what must not
happen is that it grows faster than the ranks. Seconds of CPU are summed over all ranks and say
more than seconds of the clock where ranks share cores.

Finished runs are kept in .bench-peers/growth.jsonl: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from figures import host_machine
from peers.launch import CHECKOUT, Failure
from peers.measuring import Measuring, RunLog, code_digest
from peers.workload import OURS_SAMO, Case, Run, Size

BASE = Size("growth", blocks=4, width=512, heads=8, tokens=64, vocabulary=512)
TOLERANCE = 0.2
"""An exponent stands out if it is so much above the expected one."""
START_RANKS = (1, 2, 4, 8, 16, 32)
LOCAL_RANKS = (8, 32, 128, 512)
TIMEOUT = 900.0


@dataclass(frozen=True)
class Curve:
    """Runs at growing x, and the exponents that the arithmetic asks for."""

    points: Mapping[int, tuple[Size, Case]]
    expected: Mapping[str, float]


def _sizes(field: str, values: Sequence[int], base: Size = BASE) -> dict[int, tuple[Size, Case]]:
    changes: list[dict[str, Any]] = [{field: value} for value in values]
    return {
        value: (replace(base, **change), OURS_SAMO)
        for value, change in zip(values, changes, strict=True)
    }


CURVES = {
    "depth": Curve(
        _sizes("blocks", (2, 4, 8, 16)), {"seconds": 1, "cpu_seconds": 1, "memory_bytes": 1}
    ),
    "width": Curve(
        _sizes("width", (256, 512, 1024)), {"seconds": 2, "cpu_seconds": 2, "memory_bytes": 2}
    ),
    "microbatches": Curve(
        _sizes("microbatches", (1, 2, 4, 8, 16, 32)),
        {"seconds": 1, "cpu_seconds": 1, "memory_bytes": 0},
    ),
    "stages": Curve(
        {n: (replace(BASE, blocks=8), OURS_SAMO.at(n, 1)) for n in (1, 2, 4, 8)},
        {"seconds": 1, "cpu_seconds": 1, "memory_bytes": 1, "p2p_bytes": 0},
    ),
    "replicas": Curve(
        {n: (BASE, OURS_SAMO.at(1, n)) for n in (1, 2, 4, 8)},
        {"seconds": 1, "cpu_seconds": 1, "memory_bytes": 1, "gradient_bytes": 0},
    ),
}
STARTS = ("start", "start in one process")
START_EXPECTED = {"seconds": 1.0, "cpu_seconds": 1.0}


# -- exponents --------------------------------------------------------------------------------


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """b of the y = a·x^b that is nearest in logarithms; None where a y is not positive."""
    if len(xs) < 2 or min(ys) <= 0:
        return None
    fit = statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])
    return fit.slope


def exponents(points: Mapping[int, float], expected: float) -> dict[str, Any]:
    """Over all points and over the last two, and whether the latter stands out."""
    xs, ys = list(points), list(points.values())
    last = exponent(xs[-2:], ys[-2:])
    return {
        "points": {str(x): float(f"{y:.5g}") for x, y in points.items()},
        "exponent": None if (whole := exponent(xs, ys)) is None else round(whole, 2),
        "last_exponent": None if last is None else round(last, 2),
        "expected": expected,
        "stands_out": last is not None and last > expected + TOLERANCE,
    }


# -- steps ------------------------------------------------------------------------------------


def measure_curve(
    measuring: Measuring, curve: Curve, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Exponents by quantity; rounds are interleaved, and medians of them count."""
    runs = {x: Run(case, size, "bf16", steps, 1) for x, (size, case) in curve.points.items()}
    found: dict[int, list[dict[str, float]]] = {x: [] for x in runs}
    for number in range(rounds):
        for x, run in runs.items():
            result = measuring.result(run, number)
            if isinstance(result, Failure):
                raise RuntimeError(f"{run.case.key} at {x} {result.reason}\n{result.output}")
            found[x].append(
                {
                    "seconds": result["median_seconds"],
                    "cpu_seconds": result["cpu_seconds"],
                    "memory_bytes": sum(result["peak_bytes_above_libraries"]),
                    "p2p_bytes": result["phases"]["p2p_bytes_sent"],
                    "gradient_bytes": result["phases"]["gradient_bytes_sent"],
                }
            )
    return {
        name: exponents(
            {x: statistics.median(row[name] for row in rows) for x, rows in found.items()}, asked
        )
        for name, asked in curve.expected.items()
    }


# -- starts -----------------------------------------------------------------------------------


def start_model(ranks: int) -> tuple[Any, Any, Any]:
    """Model, data and configuration of the smallest run on so many ranks: two stages if it can."""
    from peers.contenders.ours import InOrder, model_of
    from peers.gpt import Stream

    import axsparse as ax

    stages = 2 if ranks % 2 == 0 else 1
    size = Size("start", 2, 32, 2, tokens=8, vocabulary=64, microbatches=ranks // stages)
    config = ax.configure(
        {
            "batch": {"global_batch_size": size.microbatches, "microbatch_size": 1},
            "layout": {"g_inter": stages, "g_data": ranks // stages},
            "train": {"steps": 1, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
        }
    )
    data = ax.Datasets(InOrder(Stream(size, 1), size.tokens))
    return model_of(size, "bf16"), data, config


def start_rank(began: float, folder: Path) -> None:
    """One rank under mpirun: builds, takes a step, and says when and what it took."""
    import axsparse as ax

    def main(job: ax.Job) -> None:
        model, data, config = start_model(job.transport.size)
        ax.build(job, model, lambda: data, config, quiet=True).step()
        found = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time()}
        (folder / f"rank{job.transport.rank}.json").write_text(json.dumps(found))

    ax.run(main)


def start_job(ranks: int) -> dict[str, float]:
    """Seconds from the launcher to the end of the first step, and CPU seconds of all ranks."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    with tempfile.TemporaryDirectory(prefix="axsparse-growth-") as folder:
        program = [sys.executable, __file__, "--start-rank", str(time.monotonic()), folder]
        path = f"{Path(__file__).parent}{os.pathsep}{CHECKOUT}"
        subprocess.run(  # noqa: S603
            [mpirun, "-n", str(ranks), *program],
            check=True,
            env=os.environ | {"PYTHONPATH": path},
            timeout=TIMEOUT,
        )
        rows = [json.loads(file.read_text()) for file in Path(folder).glob("rank*.json")]
    assert len(rows) == ranks
    return {
        "seconds": max(row["seconds"] for row in rows),
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
    }


def start_local(ranks: int) -> dict[str, float]:
    """The same with ranks that take turns in one process of its own."""
    program = [sys.executable, __file__, "--start-local", str(ranks)]
    path = f"{Path(__file__).parent}{os.pathsep}{CHECKOUT}"
    done = subprocess.run(  # noqa: S603
        program,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=TIMEOUT,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def local_ranks(ranks: int) -> dict[str, float]:
    """Build and take a step on so many ranks of this process; imports are done before."""
    import axsparse as ax
    from axsparse.runtime.local.local_transport import LocalTransport
    from axsparse.runtime.local.local_world import LocalWorld

    world: LocalWorld[None] = LocalWorld(ranks)
    model, data, config = start_model(ranks)

    def main(rank: int) -> None:
        job = ax.Job(LocalTransport(world, rank))
        trainer = ax.build(job, model, lambda: data, config, quiet=True)
        trainer.step()
        trainer.close()

    began, cpu = time.monotonic(), time.process_time()
    world.run(main)
    return {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}


def measure_starts(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Exponents of a start over ranks; the least of the rounds counts, since starts only wait."""
    counts, measure = (START_RANKS, start_job) if name == "start" else (LOCAL_RANKS, start_local)
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in counts}
    for number in range(rounds):
        for ranks in counts:
            row = measure(ranks)
            found[ranks].append(row)
            print(
                f"round {number + 1} {name} of {ranks}: {row['seconds']:.1f} s, "
                f"{row['cpu_seconds']:.1f} s of CPU",
                file=sys.stderr,
                flush=True,
            )
    return {
        quantity: exponents(
            {ranks: min(row[quantity] for row in rows) for ranks, rows in found.items()}, asked
        )
        for quantity, asked in START_EXPECTED.items()
    }


# -- report -----------------------------------------------------------------------------------


def table(curves: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = [
        "| over | figure | at each x | exponent | of the last doubling | asked for | |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve, quantities in curves.items():
        for quantity, row in quantities.items():
            points = ", ".join(f"{x}: {y:.4g}" for x, y in row["points"].items())
            mark = "**stands out**" if row["stands_out"] else ""
            lines.append(
                f"| {curve} | {quantity} | {points} | {row['exponent']} | {row['last_exponent']} "
                f"| {row['expected']:g} | {mark} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*CURVES, *STARTS]
    parser.add_argument("--curves", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--log", type=Path, default=CHECKOUT / ".bench-peers" / "growth.jsonl")
    parser.add_argument("--save", type=Path, help="write JSON here")
    parser.add_argument("--start-rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--start-local", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start_rank:
        began, folder = arguments.start_rank
        start_rank(float(began), Path(folder))
    if arguments.start_local:
        local_ranks(2)  # what is loaded on first use
        print(json.dumps(local_ranks(arguments.start_local)))
        return 0
    machine = host_machine()
    log = RunLog(arguments.log, code_digest(json.dumps(machine)))
    measuring = Measuring(log, TIMEOUT, max_foreign=1.0, retries=0)
    for name in arguments.curves:
        if name in CURVES:
            measuring.plan(
                (Run(case, size, "bf16", arguments.steps, 1), number)
                for size, case in CURVES[name].points.values()
                for number in range(arguments.rounds)
            )
    found = {}
    for name in arguments.curves:
        try:
            found[name] = (
                measure_curve(measuring, CURVES[name], arguments.rounds, arguments.steps)
                if name in CURVES
                else measure_starts(name, arguments.rounds)
            )
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"growth: error: {name}: {error}", file=sys.stderr)
            return 1
        print(table({name: found[name]}), flush=True)
    result = {"machine": machine, "rounds": arguments.rounds, "curves": found}
    if arguments.save:
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
