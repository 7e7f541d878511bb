"""The numbers that one update of one tensor needs beside its state."""

from __future__ import annotations

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
