"""AdamW (Loshchilov and Hutter 2019, algorithm 2) over kept entries.

    m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) g²
    θ ← θ (1 − ηλ) − η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

The operations and their order are as in `torch.optim.AdamW` with `foreach=False` and `fused=False`,
so that kept entries have the bits of a masked dense run, with one exception: square roots are
rounded to the nearest number, which torch's on CPUs are not always.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.optim.optimizer import Compiled, Hyper, Optimizer, StateBlock


def update_moments(block: StateBlock, hyper: Hyper) -> None:
    beta1, beta2 = hyper.betas
    block.moments["exp_avg"].lerp_(block.grad, 1 - beta1)
    block.moments["exp_avg_sq"].mul_(beta2).addcmul_(block.grad, block.grad, value=1 - beta2)


def rounded_root(values: Tensor) -> Tensor:
    """The nearest square roots, as loops and kernels have them, and torch on CPUs not always."""
    if not values.is_cpu:
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(values.numpy()))


def apply(block: StateBlock, statistics: Tensor | None, hyper: Hyper) -> None:
    assert statistics is None
    *_, decay, correction, eps, rate = factors(hyper)
    block.master.mul_(decay)
    denominator = rounded_root(block.moments["exp_avg_sq"]).div_(correction).add_(eps)
    block.master.addcdiv_(block.moments["exp_avg"], denominator, value=rate)


def factors(hyper: Hyper) -> tuple[float, ...]:
    """1 − β₁, β₂, 1 − β₂, 1 − ηλ, √(1 − β₂ᵗ), ε, −η / (1 − β₁ᵗ)."""
    beta1, beta2 = hyper.betas
    return (
        1 - beta1,
        beta2,
        1 - beta2,
        1 - hyper.learning_rate * hyper.weight_decay,
        math.sqrt(1 - beta2**hyper.step),
        hyper.eps,
        -hyper.learning_rate / (1 - beta1**hyper.step),
    )


ADAMW = Optimizer(
    moments=("exp_avg", "exp_avg_sq"),
    update_moments=update_moments,
    statistics=None,
    apply=apply,
    compiled=Compiled("adamw", factors),
)
