"""Time of a training step in one process, SAMO against dense, and where it goes: `make bench`.

    python benchmarks/step_time.py [--precision fp32] [--save FILE]

takes a layer of GPT-3 2.7B at 90 % in its place, with weights that are sparse and dense at rest.

One thread, one rank. Both are trained side by side, one step each in an order that is drawn anew
for each round; the ratio is taken within a round. Seconds are of the CPU that this process had,
since a machine that is shared counts other people's work into wall-clock time.

Compression is the phase of that name: gathering kept entries and adding them up. Dense training
has it, too, where it adds up what is not compressed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from axsparse.config.model_config import GptConfig
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.training.trainer import Trainer, build

os.environ["OMP_NUM_THREADS"] = "1"

from figures import figure, host_machine, shuffled

from axsparse.observe.phases import Phases

HIDDEN, TOKENS, MICROBATCHES = 1024, 1024, 8
DENSE = "dense"
SHOWN = ("compress", "optimizer")
VARIANTS: Mapping[str, Mapping[str, Any]] = {DENSE: {"enabled": False}, "SAMO": {}}


@dataclass
class Row:
    """CPU seconds of one variant, a value a round."""

    cpu: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)


class CpuPhases(Phases):
    """Phases in seconds of CPU time, which keep those of the step that ended last."""

    def __init__(self) -> None:
        super().__init__(time.process_time)
        self.ended: Mapping[str, float] = {}

    def end_step(self) -> Mapping[str, float]:
        self.ended = super().end_step()
        return self.ended


def make_trainer(config: Config) -> Trainer:
    """A trainer of a GPT whose phases are in seconds of CPU time."""
    with mock.patch("axsparse.training.trainer.Phases", CpuPhases):
        return trainer_of(config)


def take_step(trainer: Trainer, row: Row | None) -> None:
    """One step of one variant, and what it took, unless it only warms up."""
    trainer.step()
    assert isinstance(trainer.phases, CpuPhases)
    seconds = trainer.phases.ended
    if row is not None:
        row.cpu.append(seconds["step"])
        for name in SHOWN:
            row.phases.setdefault(name, []).append(seconds[name])


def run(layers: int, rounds: int) -> dict[str, Row]:
    """Train SAMO and dense in turn."""
    microbatches = MICROBATCHES
    return in_turn(
        rounds,
        {
            name: config_of(layers, HIDDEN, TOKENS, microbatches=microbatches, samo=dict(samo))
            for name, samo in VARIANTS.items()
        },
    )


def in_turn(rounds: int, configs: Mapping[str, Config]) -> dict[str, Row]:
    """Train all in turn."""
    trainers = {name: make_trainer(config) for name, config in configs.items()}
    rows = {name: Row() for name in configs}
    for number in range(-1, rounds):  # one to warm up
        for name in shuffled(rows, number):
            take_step(trainers[name], rows[name] if number >= 0 else None)
    for trainer in trainers.values():
        trainer.close()
    return rows


def at_rest(tokens: int, precision: str, rounds: int) -> dict[str, Any]:
    """CPU seconds of a step of one sequence in a recomputed layer whose weights are dense at rest,
    and how many times as long it takes where they are sparse."""
    rows = in_turn(
        rounds,
        {
            kind: config_of(
                *(1, 2560, tokens),
                microbatches=1,
                samo={"weights": kind},
                precision=precision,
                pipeline={"checkpoint_activations": 1},
            )
            for kind in ("dense", "sparse")
        },
    )
    dense, sparse = rows["dense"].cpu, rows["sparse"].cpu
    ratios = [other / own for own, other in zip(dense, sparse, strict=True)]
    found = figure("CPU s", dense), figure("× dense at rest", ratios)
    return dict(zip(("dense", "sparse"), (each.row() for each in found), strict=True))


def config_of(layers: int, hidden: int, tokens: int, **sections: object) -> Config:
    """Settings of a GPT in bf16 whose microbatches are one sequence, without evaluations.

    `microbatches` may be among the sections; complete sections take the place of these.
    """
    return Config.model_validate(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_heads": max(1, hidden // 64),
                "sequence_length": tokens,
                "vocab_size": 512,
            },
            "batch": {
                "global_batch_size": sections.pop("microbatches", 2),
                "microbatch_size": 1,
            },
            "precision": "bf16",
            "pruning": {"sparsity": 0.9, "method": "random"},
            "train": {"steps": 10**6, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
            **sections,
        }
    )


def trainer_of(config: Config, *, quiet: bool = True) -> Trainer:
    """A trainer on one rank; a quiet one has no run directory."""
    settings = config.model
    assert isinstance(settings, GptConfig)
    generator = torch.Generator().manual_seed(1)
    words, tokens = settings.vocab_size, settings.sequence_length
    drawn = torch.randint(words, (64 * tokens + 1,), generator=generator).numpy()
    data = TokenDataset("random", "0", words, drawn.astype("uint16"), tokens)
    datasets = Datasets(data, None)
    return build(
        Job(LocalTransport()),
        gpt(settings, settings.sequence_length),
        lambda: datasets,
        config.with_origins("benchmarks", {}),
        quiet=quiet,
    )


def main() -> None:
    """Measure weights that are sparse at rest beside dense ones."""
    parser = argparse.ArgumentParser(description="A step with weights that are sparse at rest.")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path, help="write JSON here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": host_machine(), "precision": given.precision}
    for tokens in (256, 1024, 2048):
        result[f"{tokens} tokens"] = at_rest(tokens, given.precision, given.rounds)
        print(tokens, result[f"{tokens} tokens"], flush=True)
    if given.save:
        given.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
