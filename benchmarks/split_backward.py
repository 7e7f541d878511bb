"""Steps with split backwards against whole ones, of real compute, in turn.

    mpirun -n 2 python benchmarks/split_backward.py --save benchmarks/results/split_backward.json
    python benchmarks/split_backward.py --stages 1 --save benchmarks/results/split_backward.json

Each variant has a trainer on the same ranks, and they step in turn, in an order that changes from
round to round. A step's time is that of
the rank that ends last after a common start. Reported is the median over rounds of the ratio of the
two steps of one round, and the bubble of each variant:
the mean over ranks of the phase and of the wait for the last rank. Losses have to be the same bits.
The model is that of benchmarks/peers: a GPT of 34 million parameters, 8 microbatches of 256 tokens.

On a machine that others use, `chrt -r 1` before the command lets both ranks run first; Linux then
takes 5 % of each second from them, so that `--rest 0.5` and a step shorter than 0.9 s are needed.
Seconds of CPU, whose quartiles of ratios are reported as well, change less with what others do;
with one stage they say what splitting costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from emulated import machine

from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.communication import Transport
from axsparse.runtime.connection import connect
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.training.build import build
from axsparse.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from peers.workload import SIZES, Size

VARIANTS: dict[str, dict[str, bool]] = {
    "whole": {"split_backward": False},
    "split": {"split_backward": True},
}


def main() -> None:
    """Measure on the ranks of this job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=0, help="of a sequence; 0: as many as peers")
    parser.add_argument("--blocks", type=int, default=0, help="0: as many as peers")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--stages", type=int, default=0, help="0: as many as ranks")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--slack", type=int, default=1)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    transport = connect()
    stages = arguments.stages or transport.size
    grid = Grid(stages, transport.size // stages)
    size = SIZES[arguments.size]
    size = replace(
        size, tokens=arguments.tokens or size.tokens, blocks=arguments.blocks or size.blocks
    )
    trainers = {
        name: trainer_of(transport, grid, size, arguments, pipeline)
        for name, pipeline in VARIANTS.items()
    }
    rows: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in VARIANTS}
    for round_number in range(arguments.rounds + 2):  # the first two warm up
        first = round_number % len(VARIANTS)
        names = [*list(VARIANTS)[first:], *list(VARIANTS)[:first]]
        for name in names:
            time.sleep(arguments.rest)
            rows[name].append(step(transport, trainers[name]))
    losses = {name: [loss for *_, loss in found] for name, found in rows.items()}
    assert losses["whole"] == losses["split"], "a bit has changed"
    result = summary({name: found[2:] for name, found in rows.items()}, arguments)
    transport.close()
    if transport.rank:
        return
    key = (
        f"{grid.g_inter}x{grid.g_data}, {size.name}, {size.blocks} blocks, {size.tokens} tokens, "
        f"{arguments.precision}, {arguments.microbatches} microbatches"
    )
    print(f"{key}: {json.dumps(result)}")
    if arguments.save:
        found = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
        found[key] = result
        arguments.save.write_text(json.dumps(found, indent=1) + "\n")


def trainer_of(
    transport: Transport,
    grid: Grid,
    size: Size,
    arguments: argparse.Namespace,
    pipeline: dict[str, bool],
) -> Trainer:
    """A trainer of the model; all ranks call this together."""
    config = Config.model_validate(
        {
            "model": {
                "num_layers": size.blocks,
                "hidden_size": size.width,
                "num_heads": size.heads,
                "sequence_length": size.tokens,
                "vocab_size": size.vocabulary,
            },
            "batch": {
                "global_batch_size": arguments.microbatches * grid.g_data,
                "microbatch_size": 1,
            },
            "layout": {"split": size.split(grid.g_inter)},
            "pipeline": {**pipeline, "slack": arguments.slack},
            "precision": arguments.precision,
            "pruning": {"sparsity": arguments.sparsity},
            "train": {"steps": 10**6, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e11},
            "checkpoint": {"every": 0},
            "schedule": {"warmup_steps": 10},
        }
    )
    count = size.tokens * arguments.microbatches * grid.g_data * 64 + 1
    tokens = np.random.default_rng(3).integers(0, size.vocabulary, count, dtype=np.uint16)
    data = Datasets(TokenDataset("random", "0", size.vocabulary, tokens, size.tokens))
    model = gpt(of_family(config.model, GptConfig), size.tokens)
    return build(Job(transport), model, lambda: data, config, grid=grid, quiet=True)


def step(transport: Transport, trainer: Trainer) -> tuple[float, float, float, float]:
    """One step: its seconds, the mean seconds that a rank had nothing to run, the seconds of CPU of
    all ranks, and its loss."""
    sum_by_owner(transport.world, transport.backoff, [0.0])
    phases = trainer.parts.phases
    phases.begin_step()
    began, used = time.perf_counter(), time.process_time()
    verdict = trainer.step()
    own, used = time.perf_counter() - began, time.process_time() - used
    bubble = phases.end_step()["bubble"]
    everyone = sum_by_owner(transport.world, transport.backoff, [own, bubble, used])
    slowest = max(row[0] for row in everyone)
    idle = statistics.fmean(row[1] for row in everyone)
    return slowest, idle, sum(row[2] for row in everyone), verdict.loss


def summary(
    rows: dict[str, list[tuple[float, float, float, float]]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Medians of the variants, and of the ratios of the steps of one round."""
    pairs = list(zip(rows["split"], rows["whole"], strict=True))
    quartiles = statistics.quantiles([split[0] / whole[0] for split, whole in pairs], n=4)
    cpu = [split[2] / whole[2] for split, whole in pairs]
    return {
        "split_over_whole": round(quartiles[1], 4),
        "quartiles": [round(value, 4) for value in quartiles],
        "best_over_best": round(
            min(row[0] for row in rows["split"]) / min(row[0] for row in rows["whole"]), 4
        ),
        "cpu_over_cpu": [round(value, 4) for value in statistics.quantiles(cpu, n=4)],
        "step_ms": {
            name: round(1e3 * statistics.median(row[0] for row in found), 1)
            for name, found in rows.items()
        },
        "bubble_fraction": {
            name: round(statistics.median(row[1] / row[0] for row in found), 4)
            for name, found in rows.items()
        },
        "rounds": arguments.rounds,
        "microbatches": arguments.microbatches,
        "sparsity": arguments.sparsity,
        "slack": arguments.slack,
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
