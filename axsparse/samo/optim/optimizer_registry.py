"""The optimizers that a configuration can name (`samo/optim/optimizer.py` says how to add one)."""

from __future__ import annotations

from axsparse.config.schema import OptimizerConfig
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.samo.optim.sgd import sgd

OPTIMIZERS = {"adamw": ADAMW, "lamb": LAMB}
"""The optimizers without settings of their own, by name; `optimizer_of` makes the others."""


def optimizer_of(settings: OptimizerConfig) -> Optimizer:
    """The optimizer of a configuration."""
    if settings.name == "sgd":
        return sgd(settings.momentum, nesterov=settings.nesterov)
    return OPTIMIZERS[settings.name]
