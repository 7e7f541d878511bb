"""axsparse: train large pruned networks over pipeline stages and replicas.

The names below are the Python API; each is loaded when it is first used, so that
commands which need neither torch nor MPI start at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axsparse.runtime.process import end_early, limit_threads
from axsparse.runtime.provenance import __version__ as __version__

if TYPE_CHECKING:
    from axsparse.config.load import configure as configure
    from axsparse.config.schema import Config as Config
    from axsparse.data.dataset import ArrayDataset as ArrayDataset
    from axsparse.data.dataset import Dataset as Dataset
    from axsparse.data.dataset import Datasets as Datasets
    from axsparse.data.dataset import TokenDataset as TokenDataset
    from axsparse.data.sources import Blend as Blend
    from axsparse.data.torch_dataset import from_torch as from_torch
    from axsparse.models.layer import Layer as Layer
    from axsparse.models.layer import Model as Model
    from axsparse.models.layer import StartValues as StartValues
    from axsparse.models.layer import Tie as Tie
    from axsparse.models.layer import TpStyle as TpStyle
    from axsparse.models.layer import count_top1 as count_top1
    from axsparse.models.own_forward import from_module as from_module
    from axsparse.models.sequential import from_sequential as from_sequential
    from axsparse.models.start_weights import open_weights as open_weights
    from axsparse.models.start_weights import start_from as start_from
    from axsparse.models.zoo.model_registry import named_model as named_model
    from axsparse.planner.plan_model import plan_for as plan_for
    from axsparse.runtime.errors import AxsparseError as AxsparseError
    from axsparse.runtime.errors import ConfigError as ConfigError
    from axsparse.runtime.errors import DataError as DataError
    from axsparse.runtime.errors import InUseError as InUseError
    from axsparse.runtime.errors import MissingInputError as MissingInputError
    from axsparse.runtime.errors import OutputError as OutputError
    from axsparse.runtime.errors import StoppedError as StoppedError
    from axsparse.runtime.errors import TrainingError as TrainingError
    from axsparse.samo.optim.optimizer import Hyper as Hyper
    from axsparse.samo.optim.optimizer import Optimizer as Optimizer
    from axsparse.samo.optim.optimizer import StateBlock as StateBlock
    from axsparse.samo.pruned_weight import accelerate as accelerate
    from axsparse.training.export import export as export
    from axsparse.training.export import load as load
    from axsparse.training.load_pruned import load_pruned as load_pruned
    from axsparse.training.run_sources import hf as hf
    from axsparse.training.run_sources import tokens as tokens
    from axsparse.training.trainer import Trainer as Trainer

_HOMES = {
    name: f"axsparse.{module}"
    for module, names in {
        "config.load": ("configure",),
        "config.schema": ("Config",),
        "data.dataset": ("ArrayDataset", "Dataset", "Datasets", "TokenDataset"),
        "data.sources": ("Blend",),
        "data.torch_dataset": ("from_torch",),
        "models.layer": ("Layer", "Model", "StartValues", "Tie", "TpStyle", "count_top1"),
        "models.own_forward": ("from_module",),
        "models.sequential": ("from_sequential",),
        "models.start_weights": ("open_weights", "start_from"),
        "models.zoo.model_registry": ("named_model",),
        "planner.plan_model": ("plan_for",),
        "runtime.errors": (
            *("AxsparseError", "ConfigError", "DataError", "MissingInputError"),
            *("InUseError", "OutputError", "StoppedError", "TrainingError"),
        ),
        "samo.optim.optimizer": ("Hyper", "Optimizer", "StateBlock"),
        "samo.pruned_weight": ("accelerate",),
        "training.export": ("export", "load"),
        "training.load_pruned": ("load_pruned",),
        "training.run_sources": ("hf", "tokens"),
        "training.trainer": ("Trainer",),
    }.items()
    for name in names
}
"""The module that defines each public name."""
__all__ = ["__version__", *sorted(_HOMES)]
limit_threads(os.environ)  # here, before anything loads torch


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'axsparse' has no attribute {name!r}")
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = end_early
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
