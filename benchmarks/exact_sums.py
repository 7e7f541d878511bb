"""What exact sums of gradients (`samo.gradient: exact`) cost, and what they do to a loss.

    python benchmarks/exact_sums.py quality --save FILE
    mpirun -n 4 python benchmarks/exact_sums.py cost --stages 2 --save FILE

`cost`: a GPT of 13 M parameters, 8 microbatches a step, trained by several settings in turn, one
step each in an order that is drawn anew for each round. Seconds are of wall time and of CPU, the
latter of all ranks together and without the polling of ranks that wait; ratios are taken within a
round. Bytes are the state of all ranks, and what a rank sends to other replicas in a step.

`quality`: a GPT of 0.4 M parameters on the source files of Python's standard library, 500 steps,
three seeds; the validation loss after the last step. What is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from figures import host_machine, quartiles, shuffled
from small_gpt import config_of, trainer_of

from axsparse.data.dataset import Datasets
from axsparse.data.stdlib import stdlib_dataset
from axsparse.observe.phases import Phases
from axsparse.runtime.communication import Transport
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.trainer import Trainer

MODES = ("fp32", "half", "exact")
LAYERS, HIDDEN, MICROBATCHES = 4, 512, 8
WINDOW = 32
"""Tokens of a sequence where losses are compared."""
WAITING = ("bubble",)
"""Phases in which a rank waits for others."""


def cost(tokens: int, rounds: int, stages: int, precision: str, which: list[float]) -> Any:
    """Figures of every mode at every sparsity, on the ranks of this job."""
    found: dict[str, Any] = {}
    for sparsity in which:
        trainers = {mode: _trainer(mode, sparsity, tokens, stages, precision) for mode in MODES}
        rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(-2, rounds):  # two to warm up
            for mode in shuffled(rows, number):
                row = _step(trainers[mode])
                if number >= 0:
                    rows[mode].append(row)
        found[str(sparsity)] = {
            mode: {
                "seconds": quartiles([row["seconds"] for row in rows[mode]]),
                "cpu_seconds": quartiles([row["cpu"] for row in rows[mode]]),
                **{
                    f"{kind}_over_{other}": quartiles(
                        [
                            ours[kind] / theirs[kind]
                            for ours, theirs in zip(rows[mode], rows[other], strict=True)
                        ]
                    )
                    for kind in ("seconds", "cpu")
                    for other in MODES
                    if other != mode
                },
                "state_bytes": rows[mode][-1]["state"],
                "gradient_bytes_sent": rows[mode][-1]["sent"],
            }
            for mode in MODES
        }
        found[str(sparsity)]["parameters"] = trainers["fp32"].parts.survey.num_params
        for trainer in trainers.values():
            trainer.close()
    return found


def _trainer(mode: str, sparsity: float, tokens: int, stages: int, precision: str) -> Trainer:
    config = config_of(
        LAYERS,
        HIDDEN,
        tokens,
        words=2048,
        microbatches=MICROBATCHES,
        precision=precision,
        samo={"gradient": mode},
        pruning={"sparsity": sparsity, "method": "random"},
    )
    transport = _transport()
    grid = Grid(stages, transport.size // stages)
    with mock.patch("axsparse.training.parts.Phases", partial(Phases, time.process_time)):
        return trainer_of(config, transport=transport, grid=grid)


def _transport() -> Transport:
    if "PMI_RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        return LocalTransport(LocalWorld(1), 0)
    from mpi4py import MPI

    from axsparse.runtime.mpi.mpi_transport import MpiTransport

    return MpiTransport(MPI.COMM_WORLD.Dup())


def _step(trainer: Trainer) -> dict[str, float]:
    """One step on all ranks together, and what it took."""
    phases, before = trainer.parts.phases, trainer._bytes_sent()[0]
    _summed(trainer, 0.0)
    began = time.perf_counter()
    phases.begin_step()
    trainer.step()
    taken = phases.end_step()
    own = taken["step"] - sum(taken[name] for name in WAITING)
    seconds = time.perf_counter() - began
    ranks = trainer.parts.transport.size
    return {
        "seconds": _summed(trainer, seconds) / ranks,
        "cpu": _summed(trainer, own),
        "state": _summed(trainer, trainer.state_bytes().total),
        "sent": _summed(trainer, trainer._bytes_sent()[0] - before) / ranks,
    }


def _summed(trainer: Trainer, value: float) -> float:
    """The sum over all ranks, which wait for one another."""
    if trainer.parts.transport.size == 1:
        return value
    from mpi4py import MPI

    return float(MPI.COMM_WORLD.allreduce(value))


def quality(save: Path, steps: int, seeds: int) -> None:
    """Validation losses after the last step, a seed and mode at a time."""
    found: dict[str, Any] = json.loads(save.read_text()) if save.exists() else {}
    found["machine"] = host_machine()
    found["what"] = (
        f"GPT, 2 layers of width 128, 256 words, {WINDOW} tokens, bf16, 90 % pruned by magnitude, "
        f"{steps} steps of 4 microbatches of 4 sequences, AdamW; validation loss"
    )
    losses = found.setdefault("losses", {mode: {} for mode in MODES})
    for seed in range(1, seeds + 1):
        for mode in MODES:
            if str(seed) in losses[mode]:
                continue
            config = config_of(
                2,
                128,
                WINDOW,
                words=256,
                heads=4,
                samo={"gradient": mode},
                batch={"global_batch_size": 16, "microbatch_size": 4},
                pruning={"sparsity": 0.9},
                optimizer={"learning_rate": 2e-3},
                schedule={"warmup_steps": 20},
                train={"steps": steps, "eval_every": 0, "eval_steps": 32, "peak_flops": 1e9},
                seed=seed,
            )
            data = Datasets(stdlib_dataset("train", WINDOW), stdlib_dataset("validation", WINDOW))
            trainer = trainer_of(config, data)
            trainer.train()
            assert trainer.last_evaluation is not None
            losses[mode][str(seed)] = trainer.last_evaluation.loss
            trainer.close()
            save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(mode, seed, losses[mode][str(seed)], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["cost", "quality"])
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", type=Path, required=True, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "quality":
        quality(arguments.save, arguments.steps, arguments.seeds)
        return
    rows = cost(
        arguments.tokens,
        arguments.rounds,
        arguments.stages,
        arguments.precision,
        arguments.sparsity,
    )
    transport = _transport()
    if transport.rank:
        return
    known = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
    key = f"{arguments.stages}x{transport.size // arguments.stages}, {arguments.tokens} tokens"
    known[f"{key}, {arguments.precision}"] = {"machine": host_machine(), **rows}
    arguments.save.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    for sparsity, modes in rows.items():
        for other in ("fp32", "half"):
            ratio = {kind: modes["exact"][f"{kind}_over_{other}"] for kind in ("seconds", "cpu")}
            print(key, sparsity, "exact over", other, ratio, flush=True)


if __name__ == "__main__":
    main()
