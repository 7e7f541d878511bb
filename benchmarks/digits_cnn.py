"""Validation accuracy of the digits CNN, pruned and dense, by the same recipe and seeds.

    python benchmarks/digits_cnn.py --seeds 5 --save benchmarks/results/digits_cnn.json

Each run is the bundled `digits_cnn.yaml` on 2 stages × 2 replicas under mpirun, all 360
validation images at its end. The dense arm sets `samo.enabled=false` and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

CONFIG = "digits_cnn.yaml"
RANKS = 4
ARMS = {"dense": ["samo.enabled=false"], "pruned": ["samo.enabled=true"]}
FIRST_SEED = 1


def train(arm: str, seed: int, options: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The lines of metrics.jsonl and the saved configuration of one run; ends if it fails."""
    beside = Path(sys.executable).parent / "mpirun"
    launcher = str(beside) if beside.is_file() else shutil.which("mpirun")
    if launcher is None:
        sys.exit("no mpirun beside this Python nor on PATH; pip install 'axsparse[mpich]'")
    settings = [*ARMS[arm], f"seed={seed}", "train.peak_flops=1e9", *options]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [launcher, "-n", str(RANKS), sys.executable, "-m", "axsparse.train"]
        command += ["--config", CONFIG, "--run-dir", str(run_dir)]
        command += [part for setting in settings for part in ("--set", setting)]
        done = subprocess.run(  # noqa: S603 - this package
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            sys.exit(f"{arm}, seed {seed}: exit code {done.returncode}\n{done.stderr}")
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        saved = (run_dir / "config.yaml").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines], saved


def figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run comes to: accuracy in percent at every evaluation, and state bytes of a rank."""
    evaluations = [record for record in records if "eval_loss" in record]
    steps = [record for record in records if "loss" in record]
    return {
        "top1": round(100 * evaluations[-1]["top1"], 3),
        "eval_loss": round(evaluations[-1]["eval_loss"], 5),
        "top1_by_step": {str(e["step"]): round(100 * e["top1"], 2) for e in evaluations},
        "model_state_bytes": [steps[0]["model_state_bytes"], steps[-1]["model_state_bytes"]],
        "gradient_bytes_sent": [steps[0]["gradient_bytes_sent"], steps[-1]["gradient_bytes_sent"]],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation between runs, least and most."""
    return {
        "mean": round(statistics.mean(values), 3),
        "standard_deviation": round(statistics.stdev(values), 3) if len(values) > 1 else 0.0,
        "least": min(values),
        "most": max(values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--set", action="append", default=[], dest="options", help="for both arms")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()

    runs: dict[str, dict[str, dict[str, Any]]] = {arm: {} for arm in ARMS}
    saved = ""
    for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds):
        for arm in ARMS:
            records, saved = train(arm, seed, arguments.options)
            runs[arm][str(seed)] = figures(records)
            print(f"seed {seed}  {arm:6}  top1 {runs[arm][str(seed)]['top1']:.2f} %", flush=True)

    accuracy = {arm: [run["top1"] for run in runs[arm].values()] for arm in ARMS}
    summary = {arm: spread(values) for arm, values in accuracy.items()}
    pairs = zip(accuracy["pruned"], accuracy["dense"], strict=True)
    summary["pruned minus dense"] = spread([round(ours - dense, 3) for ours, dense in pairs])
    for name, row in summary.items():
        print(f"{name:18}  {row['mean']:+.2f} ± {row['standard_deviation']:.2f} points")
    if arguments.save:
        result = {
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "layout": "g_inter 2, g_data 2",
            "config": [
                line for line in saved.splitlines() if not line.startswith(("#", "run_dir"))
            ],
            "top1_percent": summary,
            "runs": runs,
        }
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
