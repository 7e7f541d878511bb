"""The optimizers that a configuration can name (`samo/optim/optimizer.py` says how to add one)."""

from __future__ import annotations

from axsparse.config.schema import OptimizerConfig
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.samo.optim.sgd import sgd

OPTIMIZERS = {"adamw": ADAMW, "lamb": LAMB}
"""By name; those that are made from settings, in `optimizer_of`."""


def optimizer_of(settings: OptimizerConfig) -> Optimizer:
    """The optimizer of a configuration."""
    if settings.name == "sgd":
        return sgd(settings.momentum, nesterov=settings.nesterov)
    return OPTIMIZERS[settings.name]
