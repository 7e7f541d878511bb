"""GPT-3 2.7B takes two optimizer steps on two ranks of one machine: memory by category.

    python benchmarks/gpt3_two_steps.py --machine "2 cores, 24 GiB, AMX" \\
        [--save benchmarks/results/gpt3_2.7b_two_steps.json]

Trains with embeddings pruned, with them dense, and with split backwards as well, and samples what
all processes hold. Needs 23 GB of memory and half an hour. The exit code is 1 if a run fails, or
holds more than it may.

Bytes by category: state is the formula (`samo/state_bytes.py`), which the tests hold to the byte
of the live tensors. Activations are an estimate: the inputs of recomputed layers, for each
microbatch in flight, and the larger of what one block's backward and the embedding's
gradient need. The rest of the measured peak is interpreters, libraries, messages, and what
the allocator holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from axsparse.config.load import load_config
from axsparse.config.model_config import GptConfig, of_family
from axsparse.models.survey import survey
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.state_bytes import StateFormat, stage_bytes
from axsparse.training.resolution import RunInputs, RunSpec, resolve

CONFIG, RANKS, STEPS = "gpt3_2.7b.yaml", 2, 2
COMMON = (
    "layout.g_inter=2",
    "batch.global_batch_size=2",
    "pipeline.slack=0",
    "train.eval_steps=0",
    "train.log_every=1",
    "checkpoint.every=0",
)
RUNS = {
    "embeddings pruned": (("pruning.include=all",), 14e9),
    "embeddings dense": (("pruning.include=blocks",), 18e9),
    "embeddings dense, split": (("pruning.include=blocks", "pipeline.split_backward=true"), 23e9),
}
"""The settings, and the bytes that all ranks together may hold."""
SHOWN = ("step", "loss", "grad_norm", "step_seconds", "tokens_per_second", "peak_memory_bytes")
KEPT_BY_BLOCK = 16
"""What a block keeps for its backward, in tensors of (tokens, hidden size): two norms, query,
key and value, the attention's output before and after its transposition, its residual sum,
and 4 + 4 around the GELU, with its input."""
GRADIENTS_IN_BLOCK = 10
"""Gradients that live at once in it, in the same unit: 4 + 4 around the GELU, the residual
stream's before and after."""

SAMPLE_SECONDS = 1.0


def overrides(settings: Sequence[str]) -> list[str]:
    """All settings of one run."""
    return [*COMMON, *settings, f"train.steps={STEPS}"]


def resolved(chosen: Sequence[str]) -> RunSpec:
    """What the run's ranks will agree on."""
    loaded = load_config(CONFIG, overrides(chosen))
    settings = of_family(loaded.config.model, GptConfig)
    model = gpt(settings, settings.sequence_length)
    transport = LocalTransport(LocalWorld(RANKS), 0)
    return resolve(loaded, RunInputs(model, survey(model), transport))


def state(run: RunSpec, stage: int) -> dict[str, int]:
    """Bytes of one rank's state by category."""
    samo = run.config.samo
    return asdict(
        stage_bytes(
            run.layers_of(stage),
            run.survey.ties,
            run.kept_at_start,
            StateFormat(
                half=run.config.precision != "fp32",
                gradient_bytes=run.gradient_dtype.itemsize,
                moments=len(run.optimizer.moments),
                index=samo.index,
            ),
        )
    )


def activations(run: RunSpec, stage: int) -> int:
    """Bytes of one rank's activations and dense gradients at the peak of a backward, estimated."""
    config, layers = run.config, run.layers_of(stage)
    assert config.pipeline.checkpoint_activations == 1
    slack = config.pipeline.slack
    assert slack != "auto"
    size = run.dtype.itemsize
    sizes = of_family(config.model, GptConfig)
    stream = sizes.sequence_length * config.batch.microbatch_size * sizes.hidden_size
    microbatches = config.batch.global_batch_size // config.batch.microbatch_size
    in_flight = min(microbatches, len(run.stages) - stage + slack)
    inputs = sum(layer.kind != "embedding" for layer in layers) * stream * in_flight

    def largest(blocks: bool) -> int:
        tensors = [
            p for layer in layers for p in layer.parameters if (layer.kind == "block") is blocks
        ]
        return max((parameter.numel for parameter in tensors), default=0)

    block = (KEPT_BY_BLOCK + GRADIENTS_IN_BLOCK) * stream + largest(blocks=True)
    return size * (inputs + max(block, largest(blocks=False)))


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        found.append(process)
        todo += children.get(process, [])
    return found


def field(process: int, file: str, name: str) -> int:
    """Bytes of a "Name:   123 kB" line; 0 if the process is gone."""
    try:
        for line in (Path("/proc") / str(process) / file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def measure(command: list[str]) -> dict[str, Any]:
    """Run a command; how it ended, how long it took, and the peaks of all its processes together.

    Proportional set sizes (PSS), in which shared pages count once, are summed every second. A peak
    between two samples is missed; `VmHWM` of the largest process bounds what that hides.
    """
    began = time.monotonic()
    process = subprocess.Popen(command)  # noqa: S603 - the package's own command
    peak = at = highest = 0.0
    samples = 0
    while process.poll() is None:
        processes = tree(process.pid)
        total = sum(field(p, "smaps_rollup", "Pss") for p in processes)
        if total > peak:
            peak, at = total, time.monotonic() - began
        highest = max([highest, *(field(p, "status", "VmHWM") for p in processes)])
        samples += 1
        time.sleep(SAMPLE_SECONDS)
    return {
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "peak_pss_bytes": int(peak),
        "peak_after_seconds": round(at, 1),
        "largest_process_hwm_bytes": int(highest),
        "samples": samples,
    }


def two_steps(mpirun: Sequence[str], name: str) -> dict[str, Any]:
    """Train, and say what it took; no step is there if the run failed."""
    settings, limit = RUNS[name]
    run = resolved(settings)
    options = [word for option in overrides(settings) for word in ("--set", option)]
    options = ["-m", "axsparse.train", "--config", CONFIG, *options]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        measured = measure(
            [*mpirun, "-n", str(RANKS), sys.executable, *options, "--run-dir", str(directory)]
        )
        metrics = directory / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    ranks = [state(run, stage) for stage in range(RANKS)]
    by_category = {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
    by_category["activations, estimated"] = sum(activations(run, stage) for stage in range(RANKS))
    rest = measured["peak_pss_bytes"] - sum(by_category.values())
    return {
        "command": " ".join(["mpirun", "-n", str(RANKS), "python", *options]),
        **measured,
        "limit_bytes": int(limit),
        "steps": [{key: json.loads(line)[key] for key in SHOWN} for line in lines],
        "bytes": {**by_category, "the rest": rest},
        "state_bytes_of_each_rank": [sum(rank.values()) for rank in ranks],
    }


def main() -> int:
    """Run them, report, and say whether each ended well and within its bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mpirun", default="mpirun", help="the launcher")
    parser.add_argument("--only", choices=list(RUNS), help="one of the runs")
    parser.add_argument("--machine", default="unnamed", help="how the result calls it")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    launcher = shutil.which(arguments.mpirun)
    if launcher is None:
        parser.error(f"--mpirun {arguments.mpirun}: not found; give the launcher's path")
    result: dict[str, Any] = {"machine": arguments.machine, "runs": {}}
    well = True
    for name in [arguments.only] if arguments.only else RUNS:
        run = result["runs"][name] = two_steps([launcher], name)
        well &= run["exit_code"] == 0 and run["peak_pss_bytes"] < run["limit_bytes"]
        gigabytes = {key: round(value / 1e9, 2) for key, value in run["bytes"].items()}
        print(
            f"{name}: {run['peak_pss_bytes'] / 1e9:.2f} of {run['limit_bytes'] / 1e9:.0f} GB, "
            f"{run['seconds']:.0f} s, losses {[step['loss'] for step in run['steps']]}; "
            f"GB: {gigabytes}",
            flush=True,
        )
    if arguments.save:
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
