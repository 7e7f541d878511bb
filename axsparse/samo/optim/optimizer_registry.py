"""The optimizers that a configuration can name."""

from __future__ import annotations

from axsparse.config.schema import OptimizerConfig
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.samo.optim.sgd import sgd

OPTIMIZERS = {"adamw": ADAMW, "lamb": LAMB}


def optimizer_of(settings: OptimizerConfig) -> Optimizer:
    """The update rule and its moments."""
    if settings.name == "sgd":
        return sgd(settings.momentum, nesterov=settings.nesterov)
    return OPTIMIZERS[settings.name]
