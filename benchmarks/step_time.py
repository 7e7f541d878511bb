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

os.environ["OMP_NUM_THREADS"] = "1"

from figures import shuffled
from small_gpt import config_of, trainer_of

from axsparse.observe.phases import Phases
from axsparse.training.trainer import Trainer

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
    phases = trainer.parts.phases
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
