"""axsparse: train large pruned networks over pipeline stages and replicas.

The names below are the Python API; each is loaded when it is first used, so that
commands which need neither torch nor MPI start at once.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axsparse.runtime.process import limit_threads
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

# The module that defines each public name.
_HOMES = {
    "ArrayDataset": "axsparse.data.dataset",
    "Blend": "axsparse.data.sources",
    "Config": "axsparse.config.schema",
    "Dataset": "axsparse.data.dataset",
    "Datasets": "axsparse.data.dataset",
    "Hyper": "axsparse.samo.optim.optimizer",
    "Layer": "axsparse.models.layer",
    "Model": "axsparse.models.layer",
    "Optimizer": "axsparse.samo.optim.optimizer",
    "StartValues": "axsparse.models.layer",
    "StateBlock": "axsparse.samo.optim.optimizer",
    "Tie": "axsparse.models.layer",
    "TokenDataset": "axsparse.data.dataset",
    "TpStyle": "axsparse.models.layer",
    "Trainer": "axsparse.training.trainer",
    "accelerate": "axsparse.samo.pruned_weight",
    "configure": "axsparse.config.load",
    "count_top1": "axsparse.models.layer",
    "export": "axsparse.training.export",
    "from_module": "axsparse.models.own_forward",
    "from_sequential": "axsparse.models.sequential",
    "from_torch": "axsparse.data.torch_dataset",
    "hf": "axsparse.training.run_sources",
    "load_pruned": "axsparse.training.load_pruned",
    "load": "axsparse.training.export",
    "named_model": "axsparse.models.zoo.model_registry",
    "open_weights": "axsparse.models.start_weights",
    "plan_for": "axsparse.planner.plan_model",
    "start_from": "axsparse.models.start_weights",
    "tokens": "axsparse.training.run_sources",
}
__all__ = ["__version__", *sorted(_HOMES)]
limit_threads(os.environ)  # here, before anything loads torch


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'axsparse' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
