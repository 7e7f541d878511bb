"""The model of a checkpoint, built in one process as plain modules: nothing of it is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from axsparse.config.load import LoadedConfig
from axsparse.models.layer import Model, on_meta
from axsparse.models.survey import survey
from axsparse.models.zoo.model_registry import model_without_weights
from axsparse.runtime.errors import ConfigError
from axsparse.training.checkpoint.verification import Checkpoint, checkpoint_of
from axsparse.training.export.checkpoint_export import Weights


@dataclass(frozen=True)
class SavedModel:
    """A model with the weights of a checkpoint, on the CPU and in evaluation mode."""

    checkpoint: Checkpoint
    loaded: LoadedConfig
    """The configuration of the run."""
    model: Model
    modules: list[nn.Module]
    """Those of the model's layers, in order. Both uses of a tied weight are one tensor."""


def open_saved_model(run: Path, step: int | Literal["best"] | None, *, trained: bool) -> SavedModel:
    """Read a model of a run, from the checkpoint of `step` or from the newest.

    With `trained` the weights are those that training computes with, in its precision;
    otherwise they are the fp32 masters.

    Raises ConfigError if the run trained a model of the user's own, which its configuration does
    not describe, and what `checkpoint_of` and `Weights` raise.
    """
    weights = Weights(checkpoint_of(run, step), trained=trained)
    config = weights.config()
    loaded = LoadedConfig(config, run.name, {})
    model = model_without_weights(loaded)
    surveyed = survey(replace(model, example=None))
    shapes = {name: entry.shape for name, entry in weights.parameters.items()}
    if shapes != surveyed.shapes:
        raise ConfigError(
            f"{weights.checkpoint.path}: is of a model of your own, not of the {config.model.name} "
            "of its configuration; in Python, ax.build(…, resume=RUN).evaluate() evaluates it, and "
            "ax.load gives its weights"
        )
    tensors = {name: weights.dense(name) for name in weights.parameters}
    for second, first in surveyed.ties.items():
        tensors[second] = tensors[first]
    modules = []
    for layer, info in zip(model.layers, surveyed.layers, strict=True):
        module = on_meta(layer)
        state = {parameter.name: tensors[parameter.name] for parameter in info.parameters}
        state |= {name: weights.buffer(layer.name, name) for name in weights.buffers[layer.name]}
        local = {name.removeprefix(f"{layer.name}."): value for name, value in state.items()}
        module.load_state_dict(local, assign=True)
        modules.append(module.eval().requires_grad_(requires_grad=False))
    return SavedModel(weights.checkpoint, loaded, model, modules)
