"""Time of a training step in one process, SAMO against dense, and where it goes: `make bench`.

One thread, one rank. Both are trained side by side, one step each in an order that is drawn anew
for each round; the ratio is taken within a round. Seconds are of the CPU that this process had,
since a machine that is shared counts other people's work into wall-clock time.

Compression is the phase of that name: gathering kept entries and adding them up. Dense training
has it, too, where it adds up what is not compressed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport, LocalWorld
from axsparse.training.trainer import Trainer, build

os.environ["OMP_NUM_THREADS"] = "1"

from figures import shuffled

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


def make_trainer(samo: Mapping[str, Any], layers: int) -> Trainer:
    """A trainer of a GPT whose phases are in seconds of CPU time."""
    config = config_of(layers, HIDDEN, TOKENS, microbatches=MICROBATCHES, samo=dict(samo))
    with mock.patch("axsparse.observe.phases.Phases", partial(Phases, time.process_time)):
        return trainer_of(config)


def take_step(trainer: Trainer, row: Row | None) -> None:
    """One step of one variant, and what it took, unless it only warms up."""
    phases = trainer.phases
    phases.begin_step()
    trainer.step()
    seconds = phases.end_step()
    if row is not None:
        row.cpu.append(seconds["step"])
        for name in SHOWN:
            row.phases.setdefault(name, []).append(seconds[name])


def run(layers: int, rounds: int) -> dict[str, Row]:
    """Train both in turn."""
    trainers = {name: make_trainer(samo, layers) for name, samo in VARIANTS.items()}
    rows = {name: Row() for name in VARIANTS}
    for number in range(-1, rounds):  # one to warm up
        for name in shuffled(rows, number):
            take_step(trainers[name], rows[name] if number >= 0 else None)
    for trainer in trainers.values():
        trainer.close()
    return rows


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
    settings = of_family(config.model, GptConfig)
    generator = torch.Generator().manual_seed(1)
    words, tokens = settings.vocab_size, settings.sequence_length
    drawn = torch.randint(words, (64 * tokens + 1,), generator=generator).numpy()
    data = TokenDataset("random", "0", words, drawn.astype("uint16"), tokens)
    datasets = Datasets(data, None)
    return build(
        Job(LocalTransport(LocalWorld(1), 0)),
        gpt(settings, settings.sequence_length),
        lambda: datasets,
        config.with_origins("benchmarks", {}),
        grid=Grid(1, 1),
        quiet=quiet,
    )
