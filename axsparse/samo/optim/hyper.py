"""The numbers that one update of one tensor needs beside its state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hyper:
    """What one step of one tensor needs beside its state."""

    step: int
    """Number of this update, from 1; skipped steps do not count."""
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
