"""Time of a training step in one process, SAMO against dense, and where it goes.

    python benchmarks/step_time.py [--save benchmarks/results/step_time.json]

One thread, one rank. All variants are trained side by side, one step each in an order that
is drawn anew for each round, and what is compared is the ratio to the dense step of the
same round. Seconds are of the CPU that this process had, since a machine that is shared
counts other people's work into wall-clock time, which is reported beside it. Times are
medians; brackets hold the quartiles.

Compression is the phase of that name: gathering kept entries and adding them up. Dense
training has it, too, where it adds up what is not compressed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from figures import host_machine, quartiles, shuffled
from small_gpt import config_of, trainer_of

from axsparse.observe.phases import Phases
from axsparse.training.trainer import Trainer

HIDDEN, TOKENS, MICROBATCHES = 1024, 1024, 8
DENSE = "dense"
SHOWN = ("compute", "compress", "optimizer")


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    DENSE: {"enabled": False},
    "auto": {},
    "int32": {"index": "int32"},
    "mask": {"index": "mask"},
    "auto, fp32 accumulation": {"gradient": "fp32"},
}


@dataclass
class Row:
    """What one variant took, a value a round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)


def make_trainer(samo: Mapping[str, Any], layers: int) -> Trainer:
    """A trainer of a GPT whose phases are in seconds of CPU time."""
    config = config_of(layers, HIDDEN, TOKENS, microbatches=MICROBATCHES, samo=dict(samo))
    with mock.patch("axsparse.observe.gpu_phases.Phases", partial(Phases, time.process_time)):
        return trainer_of(config)


def take_step(trainer: Trainer, row: Row | None) -> None:
    """One step of one variant, and what it took, unless it only warms up."""
    phases = trainer.parts.phases
    began = time.perf_counter()
    phases.begin_step()
    trainer.step()
    seconds = phases.end_step()
    if row is not None:
        row.wall.append(time.perf_counter() - began)
        row.cpu.append(seconds["step"])
        for name in SHOWN:
            row.phases.setdefault(name, []).append(seconds[name])


def summary(row: Row, dense: Row, trainer: Trainer) -> dict[str, object]:
    """Medians and quartiles, bytes that live, and what `auto` stands for."""
    state = trainer.state_bytes()
    samo = trainer.config.samo
    parameters = trainer.parts.survey.num_params
    blocks = [layer for layer in trainer.parts.layers if layer.spec.kind == "block"]
    pruned = [t for layer in blocks for t in layer.state.owned if t.parameter.dim() >= 2]
    return {
        "index": samo.index if samo.enabled else None,
        "accumulation": samo.gradient,
        "cpu_seconds": quartiles(row.cpu),
        "wall_seconds": quartiles(row.wall),
        "ratio_of_medians": round(statistics.median(row.cpu) / statistics.median(dense.cpu), 4),
        "wall_ratio_of_medians": round(
            statistics.median(row.wall) / statistics.median(dense.wall), 4
        ),
        "ratio_within_rounds": quartiles(
            [own / other for own, other in zip(row.cpu, dense.cpu, strict=True)]
        ),
        "share_of_step": {
            name: quartiles([part / step for part, step in zip(values, row.cpu, strict=True)])
            for name, values in row.phases.items()
        },
        "phase_seconds": {name: quartiles(values) for name, values in row.phases.items()},
        "bytes": state.total,
        "bytes_a_parameter": round(state.total / parameters, 4),
        "pruned_share_of_parameters": round(
            sum(t.parameter.numel() for t in pruned) / parameters, 4
        )
        if samo.enabled
        else 0.0,
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    titles = f"{'seconds':>8} {'compress':>9} {'optimizer':>9} {'B/par':>7}"
    print(f"{'':24} {'ratio to dense':^26} {titles}")
    for name, row in rows.items():
        low, _, high = row["ratio_within_rounds"]
        share = row["share_of_step"]
        print(
            f"{name:24} {row['ratio_of_medians']:8.4f} [{low:.4f}, {high:.4f}] "
            f"{row['cpu_seconds'][1]:8.3f} {share['compress'][1]:9.2%} "
            f"{share['optimizer'][1]:9.2%} {row['bytes_a_parameter']:7.3f}",
            flush=True,
        )


def run(names: Sequence[str], layers: int, rounds: int) -> dict[str, dict[str, object]]:
    """Train all variants in turn."""
    trainers = {name: make_trainer(VARIANTS[name], layers) for name in names}
    rows = {name: Row() for name in names}
    for number in range(-1, rounds):  # one to warm up
        for name in shuffled(rows, number):
            take_step(trainers[name], rows[name] if number >= 0 else None)
    for trainer in trainers.values():
        trainer.close()
    return {name: summary(rows[name], rows[DENSE], trainers[name]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--variants", default=",,".join(VARIANTS), help="separated by two commas")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in VARIANTS if name in {DENSE, *arguments.variants.split(",,")}]
    host = host_machine()
    rows = run(names, arguments.layers, arguments.rounds)
    show(rows)
    host["load at the end"] = [round(value, 2) for value in os.getloadavg()]
    if arguments.save:
        what = {
            "model": f"GPT, {arguments.layers} layers of width {HIDDEN}, 512 words, bf16",
            "step": f"{MICROBATCHES} microbatches of {TOKENS} tokens, AdamW, sparsity 0.9",
            "rounds": arguments.rounds,
        }
        result = {"machine": host, "what": what, "variants": rows}
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
