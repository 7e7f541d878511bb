"""Reads the weights of a run into memory, as a state dict of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from axsparse.training.checkpoint.newest import checkpoint_of
from axsparse.training.export.checkpoint_export import Weights


def load(
    run: str | Path, *, step: int | Literal["best"] | None = None, trained: bool = False
) -> dict[str, Tensor]:
    """All weights and buffers of a checkpoint, dense, by global name ("block3.fc1.weight").

    `run` is a run directory, whose checkpoint of `step` is read, by default the newest, or one
    checkpoint in it; "best" is that of the lowest validation loss (`checkpoint.keep_best`). Values
    are the fp32 masters, with zeros at pruned positions; with `trained` they are the weights that
    training computes with, in its precision. A tied weight is there once, under the name of its
    first use. One process reads it all; no MPI is needed.

    The state dict of an `nn.Sequential` that `from_sequential` made a model of has these names:

        modules.load_state_dict(ax.load("runs/my_run"))

    Raises MissingInputError if there is no such checkpoint, DataError if it is damaged.
    """
    weights = Weights(checkpoint_of(Path(run), step), trained=trained)
    tensors = {name: weights.dense(name) for name in weights.parameters}
    for layer, buffers in weights.buffers.items():
        tensors |= {name: weights.buffer(layer, name) for name in buffers}
    return tensors
