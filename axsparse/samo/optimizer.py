"""What an optimizer over compressed state is: explicit state, three parts, blocks of entries.

Every function sees aligned 1-D fp32 blocks of kept entries of one tensor, whether
these are all its entries (a dense tensor) or a tenth of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Moments = Mapping[str, Tensor]


@dataclass(frozen=True)
class Hyper:
    """What one step of one tensor needs beside its state."""

    step: int
    """Number of this update, from 1; skipped steps do not count."""
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Optimizer:
    """An update rule in three parts; a new optimizer is one file that fills these in."""

    moments: tuple[str, ...]
    """Names of the fp32 states, one value a kept entry each."""
    update_moments: Callable[[Tensor, Moments, Hyper], None]
    """`(grad, moments, hyper)`: fold a gradient block into the moments, in place."""
    statistics: Callable[[Tensor, Moments, Hyper], Tensor] | None
    """`(master, moments, hyper)`: fp64 sums of a block that are added up over the whole tensor
    (over its shards, too) before `apply`; None if the rule is elementwise."""
    apply: Callable[[Tensor, Moments, Tensor | None, Hyper], None]
    """`(master, moments, statistics, hyper)`: move the master weights, in place."""
