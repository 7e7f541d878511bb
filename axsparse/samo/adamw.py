"""AdamW (Loshchilov and Hutter 2019, algorithm 2) over kept entries.

    m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) g²
    θ ← θ (1 − ηλ) − η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

The operations and their order are those of `torch.optim.AdamW` without foreach and
fusion, so that kept entries are bitwise those of a masked dense run.
"""

from __future__ import annotations

import math

from torch import Tensor

from axsparse.samo.optimizer import Hyper, Moments, Optimizer


def update_moments(grad: Tensor, moments: Moments, hyper: Hyper) -> None:
    """First and second moments."""
    beta1, beta2 = hyper.betas
    moments["exp_avg"].lerp_(grad, 1 - beta1)
    moments["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def apply(master: Tensor, moments: Moments, statistics: Tensor | None, hyper: Hyper) -> None:
    """Decay and move the master weights."""
    assert statistics is None
    beta1, beta2 = hyper.betas
    correction1 = 1 - beta1**hyper.step
    correction2 = 1 - beta2**hyper.step
    master.mul_(1 - hyper.learning_rate * hyper.weight_decay)
    denominator = moments["exp_avg_sq"].sqrt().div_(math.sqrt(correction2)).add_(hyper.eps)
    master.addcdiv_(moments["exp_avg"], denominator, value=-hyper.learning_rate / correction1)


ADAMW = Optimizer(
    moments=("exp_avg", "exp_avg_sq"),
    update_moments=update_moments,
    statistics=None,
    apply=apply,
)
