"""axsparse through its Python API: the same layers, tokens, masks and AdamW as the peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import axsparse as ax
from axsparse.data.order import shuffled
from peers.adamw import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY
from peers.gpt import Stream, empty_layer, layer_name, start_values, summed_loss
from peers.workload import SEED, SPARSITY, Run, Size

OnStep = Callable[[float], None]
"""Called after each step with its loss."""


class InOrder:
    """The stream as a data set whose shuffled order is the order of the stream."""

    name, vocab_size = "standard library", None

    def __init__(self, stream: Stream, tokens: int) -> None:
        self._stream = stream
        self.fingerprint = stream.digest
        self.targets_per_sample = tokens
        places = np.arange(stream.sequences, dtype=np.int64)
        self._place_of = np.empty_like(places)
        self._place_of[shuffled(places, stream.sequences, SEED, 0)] = places

    def __len__(self) -> int:
        return self._stream.sequences

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        pairs = [self._stream.sequence(int(place)) for place in self._place_of[indices]]
        return (torch.cat([inputs for inputs, _ in pairs]),), torch.cat([y for _, y in pairs])

    def count_targets(self, targets: torch.Tensor) -> int:
        return targets.numel()


def model_of(size: Size, precision: Any) -> ax.Model:
    """The model of `gpt.py` as a list of layers with the same start values."""

    def values(layer: str, name: str, shape: tuple[int, ...], _: object) -> torch.Tensor:
        return start_values(size, f"{layer}.{name}", shape, precision)

    layers = []
    for index in range(size.layers):
        name = layer_name(size, index)
        layers.append(
            ax.Layer(
                name,
                partial(empty_layer, size, index),
                kind="block" if name.startswith("block") else "head" if index else "embedding",
                init=partial(values, name),
            )
        )
    return ax.Model(layers, loss=summed_loss)


def configuration(run: Run, folder: Path) -> ax.Config:
    """The settings for the arithmetic of the peers and for the variant; all others are the
    defaults."""
    case = run.case
    samo: dict[str, Any] = {"enabled": case.is_masked}
    if case.variant == "sharded":
        samo["zero_stage"] = 1
    if case.variant == "mask":
        samo["index"] = "mask"
    pipeline = {"split": {"split_backward": True}, "whole": {"split_backward": False}}
    layout: dict[str, Any] = {
        "g_inter": case.stages,
        "g_data": case.replicas,
        "split": run.size.split(case.stages),
    }
    return ax.configure(
        {
            "batch": {"global_batch_size": run.size.microbatches, "microbatch_size": 1},
            "layout": layout,
            "pipeline": pipeline.get(case.variant, {}),
            "precision": run.precision,
            "pruning": {"sparsity": SPARSITY},
            "samo": samo,
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "betas": BETAS,
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
                "clip_norm": 0.0,
            },
            "schedule": {"decay": "constant"},
            "train": {
                "steps": run.all_steps,
                "eval_every": 0,
                "eval_steps": 0,
                "peak_flops": 1e11,
            },
            "checkpoint": {"every": 0},
            "seed": SEED,
            "run_dir": str(folder),
        }
    )


def train(run: Run, folder: Path, on_step: OnStep) -> int:
    """Train as a user does, with a run directory and its metrics; returns the rank."""
    stream = Stream(run.size, run.all_steps)

    data = InOrder(stream, run.size.tokens)
    trainer = ax.Trainer(model_of(run.size, run.precision), data, configuration(run, folder))
    trainer.train(on_step=lambda _, verdict: on_step(verdict.loss))
    return trainer.rank
