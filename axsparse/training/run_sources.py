"""The model, the data and the settings that `ax.Trainer` is given, in one form each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
from torch import nn

from axsparse.config.load import load_settings
from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset, Datasets
from axsparse.data.sources import open_datasets
from axsparse.models.layer import LossFunction, MetricFunction, Model
from axsparse.models.own_forward import from_module
from axsparse.models.sequential import from_sequential, runs_in_order
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.seeds import preserved_rng


@dataclass(frozen=True)
class Hf:
    """The model and the weights of a Hugging Face folder; `ax.hf` makes one."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Token ids that lie in files; `ax.tokens` makes one."""

    settings: Mapping[str, Any]


def hf(folder: str | os.PathLike[str]) -> Hf:
    """The model of a Hugging Face folder of config.json and safetensors, at its weights.

    It is the setting `model.from`, which docs/howto/llama.md explains.
    """
    return Hf({"model.from": os.fspath(folder)})


def tokens(
    path: str | os.PathLike[str], *, validation: str | os.PathLike[str] | None = None
) -> Tokens:
    """Token ids that `axsparse data prepare` wrote, or that are read where they lie.

    They are the settings `data.path` and `data.validation`, which docs/howto/data-formats.md
    explains. Without `validation`, evaluations read the validation part of `path`.
    """
    settings = {"data.source": "tokens", "data.path": os.fspath(path)}
    if validation is not None:
        settings["data.validation"] = os.fspath(validation)
    return Tokens(settings)


ModelSource = Model | nn.Module | Hf | str | None
"""A model, a module, `ax.hf(folder)`, the name of a model such as "gpt", or None for the settings'
model."""
DataSource = Dataset | tuple[Dataset, Dataset] | Datasets | Tokens | Callable[[], Datasets] | None
"""Training data, a pair with validation data, `ax.tokens(path)`, a function that opens them where
they are read, or None for the settings' data."""


@dataclass(frozen=True)
class RunSources:
    """A model, data and settings."""

    model: Model
    open_datasets: Callable[[], Datasets]
    config: Config


# Reason: what a program gives.
def run_sources(
    model: ModelSource,
    data: DataSource,
    config: Config | Mapping[str, Any] | str | Path | None,
    settings: Mapping[str, Any],
    loss: LossFunction | None = None,
    metrics: Mapping[str, MetricFunction] = {},
) -> RunSources:
    """All of them in one form each; `loss` and `metrics` make a model of a module.

    Raises ConfigError for what has none of the forms, and what `configure` and `named_model` raise.
    """
    of_model: Mapping[str, Any] = {}
    if isinstance(model, Hf):
        of_model = model.settings
    elif isinstance(model, str):
        of_model = {"model.name": model}
    elif model is not None and not isinstance(model, Model | nn.Module):
        raise ConfigError(
            f"Trainer: model is {type(model).__name__}; give an nn.Module and loss=, an ax.Model, "
            "ax.hf(folder), or leave it out for that of the settings"
        )
    if isinstance(model, nn.Module) != (loss is not None):
        kind = type(model).__name__
        raise ConfigError(
            f"Trainer: {kind} has no loss; give loss=, which returns the summed loss of the "
            "outputs and the targets"
            if loss is None
            else f"Trainer: loss is for an nn.Module, and model is {kind}; leave it out, since "
            "such a model has its loss"
        )
    if isinstance(model, Model) and model.loss is None:
        raise ConfigError(
            "Trainer: the model's loss is None; give a function that returns the summed loss of "
            "the outputs and the targets"
        )
    given = model.loss if isinstance(model, Model) else loss
    if given is not None and (isinstance(given, type) or not callable(given)):
        shown = given.__name__ if isinstance(given, type) else repr(given)
        raise ConfigError(
            f"Trainer: loss is {shown}, which is no function of outputs and targets; give one that "
            'returns the sum over a microbatch, such as torch.nn.MSELoss(reduction="sum")'
        )
    of_data = data.settings if isinstance(data, Tokens) else {}
    whole = load_settings(config, of_model, of_data, settings)
    opener = cache(_opener(data, whole)) if isinstance(model, nn.Module) else _opener(data, whole)
    if isinstance(model, Model):
        made = model
    elif isinstance(model, nn.Module):
        assert loss is not None
        made = _model_of(model, loss, metrics, opener)
    else:
        made = named_model(whole)
    return RunSources(made, opener, whole.named(made.name))


def _model_of(
    module: nn.Module,
    loss: LossFunction,
    metrics: Mapping[str, MetricFunction],
    open_datasets: Callable[[], Datasets],
) -> Model:
    """The model of a module, cut where the first samples pass from layer to layer."""
    if isinstance(module, nn.Sequential) and runs_in_order(module):
        return from_sequential(module, loss, metrics=metrics)
    training = open_datasets().training
    with preserved_rng():
        inputs, _ = training.read(np.arange(min(2, len(training))))
    return replace(from_module(module, loss, lambda _: inputs, metrics=metrics), example=None)


def _opener(data: DataSource, config: Config) -> Callable[[], Datasets]:
    """A function that opens the data."""
    if data is None or isinstance(data, Tokens):
        return partial(open_datasets, config)
    if isinstance(data, FunctionType | partial | MethodType):
        return data
    if isinstance(data, tuple):
        if len(data) != 2:
            raise ConfigError(f"Trainer: data are {len(data)} data sets; give (train, validation)")
        data = Datasets(*data)
    datasets = data if isinstance(data, Datasets) else Datasets(cast(Dataset, data))
    return lambda: datasets
