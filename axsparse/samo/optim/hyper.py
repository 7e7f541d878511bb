"""The numbers that one update of one tensor needs beside its state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Hyper:
    """The settings of one step; `OptimizerConfig` of `config/schema.py` says what each means."""

    step: int
    """Number of this update, from 1; skipped steps do not count."""
    learning_rate: float
    """The learning rate of this step."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """0 for tensors that do not decay."""

    def adamw_factors(self) -> tuple[float, ...]:
        """The constants of one step of AdamW, in the order in which loops and kernels take them:
        1 − β₁, β₂, 1 − β₂, 1 − ηλ, √(1 − β₂ᵗ), ε, −η / (1 − β₁ᵗ)."""
        beta1, beta2 = self.betas
        return (
            1 - beta1,
            beta2,
            1 - beta2,
            1 - self.learning_rate * self.weight_decay,
            math.sqrt(1 - beta2**self.step),
            self.eps,
            -self.learning_rate / (1 - beta1**self.step),
        )
