"""What half-precision accumulation of gradients costs in accuracy, by microbatches a step.

    python benchmarks/accumulation.py [--save benchmarks/results/accumulation.json]

A small GPT learns the bytes of Python's own library in bf16, pruned, once with half and once
with fp32 accumulation from the same start over the same data. Reported are

- the error of the summed gradient: the norm of half minus fp32 sums over that of fp32 sums,
  at the first step and at weights that have been trained, for each number of microbatches;
- the loss: the mean over the last fifth of the steps, and how much that of half accumulation
  is above fp32's, beside how much it differs between seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.build import build
from axsparse.training.trainer import Trainer

TOKENS, SPARSITY = 64, 0.9
RUNS = {8: 300, 64: 100, 256: 40}
"""Steps of training by microbatches a step."""
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Of which the error of the gradient is read."""


def library_bytes() -> TokenDataset:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    tokens = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    return TokenDataset("library", "0", 256, tokens, TOKENS)


def make_trainer(data: TokenDataset, gradient: str, microbatches: int, seed: int) -> Trainer:
    config = Config.model_validate(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 128,
                "num_heads": 4,
                "sequence_length": TOKENS,
                "vocab_size": 256,
            },
            "batch": {"global_batch_size": microbatches, "microbatch_size": 1},
            "precision": "bf16",
            "pruning": {"sparsity": SPARSITY},
            "samo": {"gradient": gradient},
            "optimizer": {"learning_rate": 2e-3},
            "schedule": {"decay": "constant", "warmup_steps": 5},
            "train": {"steps": 10_000, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
            "seed": seed,
        }
    )
    return build(
        Job(LocalTransport(LocalWorld(1), 0)),
        gpt(of_family(config.model, GptConfig), TOKENS),
        lambda: Datasets(data, None),
        config,
        quiet=True,
    )


def gradient_of(trainer: Trainer, weights: Trainer | None) -> torch.Tensor:
    """All kept gradients of one more step, at the weights of another trainer if given."""
    if weights is not None:
        for own, other in zip(trainer.parts.layers, weights.parts.layers, strict=True):
            for mine, its in zip(own.state.owned, other.state.owned, strict=True):
                mine.weight_D.copy_(its.weight_D)
    trainer.step()
    trainer.close()
    return torch.cat([layer.state.gradient.double() for layer in trainer.parts.layers])


def gradient_errors(data: TokenDataset, weights: Trainer | None) -> dict[int, float]:
    """Relative error of half sums by microbatches."""
    errors = {}
    for microbatches in MICROBATCHES:
        half, full = (
            gradient_of(make_trainer(data, gradient, microbatches, 1), weights)
            for gradient in ("half", "fp32")
        )
        errors[microbatches] = round(float((half - full).norm() / full.norm()), 5)
    return errors


def losses(trainer: Trainer, steps: int) -> list[float]:
    found = [trainer.step().loss for _ in range(steps)]
    trainer.close()
    return found


def end_of(values: Sequence[float]) -> float:
    """The mean over the last fifth."""
    return statistics.fmean(values[-len(values) // 5 :])


def compare_losses(
    data: TokenDataset, microbatches: int, steps: int, seeds: int
) -> dict[str, object]:
    """Losses at the end by accumulation and seed."""
    ends: dict[str, list[float]] = {"half": [], "fp32": []}
    for seed in range(1, seeds + 1):
        for gradient, found in ends.items():
            trainer = make_trainer(data, gradient, microbatches, seed)
            found.append(end_of(losses(trainer, steps)))
    above = [half - full for half, full in zip(ends["half"], ends["fp32"], strict=True)]
    return {
        "steps": steps,
        "loss": {name: [round(value, 5) for value in found] for name, found in ends.items()},
        "half_above_fp32": [round(value, 5) for value in above],
        "mean_half_above_fp32": round(statistics.fmean(above), 5),
        "deviation_between_seeds": round(statistics.stdev(ends["fp32"]), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = library_bytes()

    trained = make_trainer(data, "fp32", 8, 1)
    losses(trained, RUNS[8])
    errors = {
        "first step": gradient_errors(data, None),
        f"after {RUNS[8]} steps": gradient_errors(data, trained),
    }
    for when, values in errors.items():
        print(when, *(f"{count}: {error:.3%}" for count, error in values.items()), flush=True)
    result: dict[str, object] = {
        "what": f"GPT, 2 layers of width 128, bf16, sparsity {SPARSITY}, microbatches of {TOKENS}",
        "torch": torch.__version__,
        "gradient_error_by_microbatches": errors,
    }
    by_microbatches: dict[int, dict[str, object]] = {}
    for microbatches, steps in RUNS.items():
        found = compare_losses(data, microbatches, steps, arguments.seeds)
        by_microbatches[microbatches] = found
        print(microbatches, json.dumps(found), flush=True)
        if arguments.save:  # what there is so far
            result["loss_by_microbatches"] = by_microbatches
            arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
