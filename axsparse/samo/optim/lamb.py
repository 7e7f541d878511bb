"""LAMB (You et al. 2020, algorithm 2) over kept entries.

    m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) g²
    u ← (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε) + λ θ
    θ ← θ − η · ‖θ‖ / ‖u‖ · u          per tensor; the ratio is 1 where either norm is 0

The paper's φ is the identity. Norms are over the kept entries of a full tensor, so they equal the
norms of the masked dense tensor. As in the paper's experiments, biases and gains of norms do not
decay; as in its algorithm, and unlike some implementations, their steps are scaled like all others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from axsparse.samo.optim import adamw
from axsparse.samo.optim.optimizer import Hyper, Optimizer, StateBlock


def statistics(block: StateBlock, hyper: Hyper) -> Tensor:
    """The sums of squares of θ and of u over a block, fp64 `(2,)`."""
    squares = [values.double().square_().sum() for values in (block.master, _step(block, hyper))]
    return torch.stack(squares)


def apply(block: StateBlock, statistics: Tensor | None, hyper: Hyper) -> None:
    """Move the master weights by u, scaled to the size of the tensor."""
    assert statistics is not None
    weight_norm, step_norm = statistics.sqrt().tolist()
    ratio = weight_norm / step_norm if weight_norm > 0 and step_norm > 0 else 1.0
    block.master.add_(_step(block, hyper), alpha=-hyper.learning_rate * ratio)


def _step(block: StateBlock, hyper: Hyper) -> Tensor:
    """u of the formula, from moments that have this step's gradient."""
    mean, square = block.moments["exp_avg"], block.moments["exp_avg_sq"]
    beta1, beta2 = hyper.betas
    denominator = adamw.rounded_root(square).div_(math.sqrt(1 - beta2**hyper.step)).add_(hyper.eps)
    adapted = mean.div(1 - beta1**hyper.step).div_(denominator)
    return adapted.add_(block.master, alpha=hyper.weight_decay)


LAMB = Optimizer(
    moments=("exp_avg", "exp_avg_sq"),
    update_moments=adamw.update_moments,  # the same recurrences
    statistics=statistics,
    apply=apply,
    num_statistics=2,
)
