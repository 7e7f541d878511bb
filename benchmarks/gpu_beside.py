"""GPT-3 2.7B on one GPU next to plain torch and FSDP2, in turn: tokens a second and memory.

    python benchmarks/gpu_beside.py [--seconds 280] [--save FILE]
    python benchmarks/gpu_beside.py --table benchmarks/results/gpu_check-nvidia-h200.json

Every run trains the same model on the same samples, `BATCH` a step, by microbatches of 1, 4 or 8:
`WARM` steps first, then `STEPS` that count, of which the median and the quartiles are kept. Dense
runs are the peers of `gpu_peers.py` and axsparse with `samo.enabled=false`; the others are pruned
to 90 %. Runs begin in the order of `RUNS`, each in a separate process while no other has the GPU;
runs that an earlier call has saved are not repeated. Model FLOP/s count 6 operations a parameter
and token and 12 · layers · hidden · sequence a token, as MosaicML's tables do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from gpu_plan import Training, planned
from gpu_report import EXIT_NO_DEVICE, Report, Row, judged, spread, table
from gpu_train import RankCoords, Worker, WorkerFailedError, probe_apart, pruned

HERE = Path(__file__).parent
CONFIG = "gpt3_2.7b.yaml"
BATCH, WARM, STEPS = 16, 5, 10
DATASHEET = 989e12
"""FLOP/s of an H100 or H200 SXM in bf16 by NVIDIA's datasheet, by which published tables count."""
MODEL_FLOPS = 6 * 2_651_673_600 + 12 * 32 * 2560 * 2048
"""Of a token, forward and backward: 6 N + 12 · layers · hidden · sequence."""
RATIO_AIM = 1.15
TOKENS_AIM = {1: 29_000, 4: 33_000, 8: 33_000}
"""Tokens a second asked of the pruned model on an H100, at 4 or at 8, by microbatch size."""
PUBLISHED = (
    "| dense, MosaicML's table, 16 H100, FSDP | | 24,142 | 44 % | |",
    "| dense, MosaicML's table, 16 H100, FSDP, FP8 | | 30,586 | | |",
)
"""Tokens a second and GPU of the same shape, in tables of llm-foundry."""
PRUNED, DENSE = "pruned, 90 %", "dense, axsparse"
UNFUSED = "pruned, 90 %, pipeline.compile=false"
GRAPHED = "pruned, 90 %, CUDA graphs"
CAPTURED = {"TORCHINDUCTOR_CUDAGRAPHS": "1"}
"""The environment in which torch.compile replays what it fuses as CUDA graphs: a layer's forward
and its backward are then one launch each."""
LOSS_TOLERANCE = 1e-3
"""Of a loss, between graphs and launches one by one of other kernels in bf16."""
PEERS = {"plain": "dense, plain torch", "fsdp2": "dense, FSDP2"}


@dataclass(frozen=True)
class Run:
    """One training, or a peer's at several microbatch sizes."""

    name: str
    sizes: tuple[int, ...]
    settings: tuple[str, ...] = ()
    peer: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


RUNS = (
    Run(PRUNED, (4,)),
    Run(PEERS["plain"], (4, 8), peer="plain"),
    Run(PRUNED, (8,)),
    Run(PRUNED, (1,)),
    Run(PEERS["fsdp2"], (4, 8), peer="fsdp2"),
    Run(DENSE, (4,), ("samo.enabled=false",)),
    Run(UNFUSED, (4,), ("pipeline.compile=false",)),
    Run(UNFUSED, (1,), ("pipeline.compile=false",)),
    Run(GRAPHED, (1, 4), ("pipeline.compile=true",), environment=CAPTURED),
    Run(PEERS["plain"], (1,), peer="plain"),
    Run(DENSE, (8,), ("samo.enabled=false",)),
)


def ours(run: Run, size: int, place: RankCoords) -> dict[str, Any]:
    """Seconds, losses and the peak of one training by axsparse."""
    batch = (f"batch.microbatch_size={size}", f"batch.global_batch_size={BATCH}")
    training = Training(
        CONFIG, (*batch, "pipeline.checkpoint_activations=0", *run.settings), WARM + STEPS
    )
    if run.name != DENSE:
        training = pruned(training, place)
    with Worker(training, place.folder, place.left, environment=run.environment) as worker:
        built = worker.event("built")
        steps = [worker.step() for _ in range(training.steps)]
        done = worker.event("done")
    memory = planned(training, "dense" if run.name == DENSE else "samo").memory
    return {
        "seconds": [step["seconds"] for step in steps[WARM:]],
        "first step": steps[0]["seconds"],
        "built in": built["seconds"],
        "losses": [step["loss"] for step in steps],
        "peak": done["peak"],
        "planned peak": memory.total - memory.overhead,
        "settings": training.all(),
    }


def theirs(run: Run, sizes: Sequence[int], place: RankCoords) -> dict[str, Any]:
    """The same of a peer, by microbatch size; what it has when its time is over."""
    saved = Path(tempfile.mkdtemp(dir=place.folder)) / "peer.json"
    command = [sys.executable, str(HERE / "gpu_peers.py"), run.peer, "--save", str(saved)]
    command += ["--batch", str(BATCH), "--warm", str(WARM), "--steps", str(STEPS)]
    command += ["--microbatches", *map(str, sizes)]
    try:
        ended = subprocess.run(  # noqa: S603  our own script
            command, capture_output=True, text=True, timeout=max(place.left, 1.0), check=False
        )
        said = (ended.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        said = "ran out of time; give more by --seconds"
    if not saved.exists():
        raise WorkerFailedError(said)
    found = json.loads(saved.read_text(encoding="utf-8"))
    return {size: found[size] for size in found if size.isdigit()}


def measure(place: RankCoords, report: Report) -> list[Row]:
    """Run what the report lacks, and save after each run; returns the rows of all."""
    part = "beside"
    found: dict[str, dict[str, Any]] = report.details.get(part) or {}
    skipped: list[Row] = []
    for run in RUNS:
        lacking = [size for size in run.sizes if str(size) not in found.get(run.name, {})]
        if not lacking:
            continue
        if place.left < 20:
            skipped.append(Row(part, f"{run.name}, {lacking}", "skip", "no time left; call again"))
            continue
        try:
            new = (
                theirs(run, lacking, place)
                if run.peer
                else {str(size): ours(run, size, place) for size in lacking}
            )
        except WorkerFailedError as error:
            skipped.append(Row(part, f"{run.name}, {lacking}", "fail", str(error)[:300]))
            continue
        found.setdefault(run.name, {}).update(new)
        rows = judged_rows(part, found)
        report.put(part, rows, found)
        print("\n".join(table(rows)), flush=True)
    return [*judged_rows(part, found), *skipped]


def judged_rows(part: str, found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """A row for each run, and the pruned model's targets compared with the best dense peer."""
    tokens = BATCH * 2048
    rows: list[Row] = []
    best: dict[str, tuple[float, str]] = {}
    for name, sizes in found.items():
        for size, each in sizes.items():
            check = f"{name}, microbatches of {size}"
            if "seconds" not in each:
                rows.append(Row(part, check, "info", "no memory: " + each["out of memory"]))
                continue
            middle = statistics.median(each["seconds"])
            rate = tokens / middle
            peak = each["peak"].get("allocated", 0) / 1e9
            said = (
                f"{rate:,.0f} tokens/s, {MODEL_FLOPS * rate / DATASHEET:.1%} of 989 TFLOP/s, "
                f"{peak:.1f} GB; {spread(each['seconds'], 's')} a step"
            )
            if name == PRUNED:
                aim = TOKENS_AIM[int(size)]
                good = rate >= aim
                rows.append(judged(part, check, said, f">= {aim:,}", good=good))
            else:
                rows.append(Row(part, check, "info", said))
            if rate > best.get(name, (0.0, ""))[0]:
                best[name] = rate, size
    peers = {name: best[name] for name in PEERS.values() if name in best}
    if peers and PRUNED in best:
        peer = max(peers, key=lambda name: peers[name][0])
        ratio = best[PRUNED][0] / peers[peer][0]
        said = f"{ratio:.3f} times {peer} with {peers[peer][1]}, ours with {best[PRUNED][1]}"
        good = ratio >= RATIO_AIM
        rows.append(judged(part, "beside the best dense peer", said, f">= {RATIO_AIM}", good=good))
        lean, heavy = found[PRUNED][best[PRUNED][1]], found[peer][peers[peer][1]]
        memory = heavy["peak"].get("allocated", 0) / max(1, lean["peak"].get("allocated", 1))
        rows.append(Row(part, "memory of that peer over ours", "info", f"{memory:.2f}"))
    return [*rows, *graphs_compute_the_same(part, found)]


def graphs_compute_the_same(part: str, found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """A row for each microbatch size whose losses both runs of the pruned model have: a graph that
    is replayed on memory of another layer or microbatch trains, but to other losses."""
    rows = []
    for size, graphed in found.get(GRAPHED, {}).items():
        losses = [run.get("losses", []) for run in (graphed, found.get(PRUNED, {}).get(size, {}))]
        if not all(losses):
            continue
        pairs = [*zip(*losses, strict=False)]
        same = all(abs(ours - its) <= LOSS_TOLERANCE * its for ours, its in pairs)
        last, other = pairs[-1]
        check = f"{GRAPHED}, microbatches of {size}: losses"
        said, aim = f"{last:.4f} at last, {other:.4f} without", f"{LOSS_TOLERANCE} apart"
        rows.append(judged(part, check, said, aim, good=same))
    return rows


def markdown(
    found: Mapping[str, Mapping[str, Any]], device: str, *, best: bool = False
) -> list[str]:
    """The runs as a table of the pages, the fastest first, and what others have published; `best`
    leaves of each model its fastest run."""
    head = (
        f"| GPT-3 2.7B, bf16, one {device} | microbatches of | tokens/s | of 989 TFLOP/s | memory |"
    )
    rows = []
    for name, sizes in found.items():
        for size, each in sizes.items():
            if "seconds" in each:
                rate = BATCH * 2048 / statistics.median(each["seconds"])
                share, peak = MODEL_FLOPS * rate / DATASHEET, each["peak"]["allocated"] / 1e9
                cells = (name, size, f"{rate:,.0f}", f"{share:.0%}".replace("%", " %"))
                rows.append((rate, name, f"| {' | '.join(cells)} | {peak:.0f} GB |"))
    rows.sort(reverse=True)
    named = [name for _, name, _ in rows]
    fastest = [
        row for n, (_, name, row) in enumerate(rows) if not (best and name in (*named[:n], UNFUSED))
    ]
    return [head, "|---|---|---|---|---|", *fastest, *PUBLISHED]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=280.0, help="for all runs together")
    parser.add_argument("--save", type=Path, help="add to this JSON, and leave out what it has")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print its table for the pages")
    arguments = parser.parse_args(words)
    if arguments.table is not None:
        saved = Report.opened(arguments.table, {})
        device = saved.measured_on["device"].removeprefix("NVIDIA ")
        for best in (True, False):
            print("\n".join(markdown(saved.details["beside"], device, best=best)) + "\n")
        return 0
    ends = time.monotonic() + arguments.seconds
    if not torch.cuda.is_available():
        print("gpu_beside: no CUDA device is here, and there is nothing else to measure")
        return EXIT_NO_DEVICE
    device = probe_apart()
    report = Report.opened(arguments.save, {"device": device.name, "torch": torch.__version__})
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(RankCoords(device, Path(folder), ends), report)
    report.put("beside", rows, report.details.get("beside"))
    print("\n".join(table(rows)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
