"""What an optimizer over compressed state is: explicit state, three parts, blocks of entries.

Every function sees aligned 1-D fp32 blocks of kept entries of one tensor, whether
these are all its entries (a dense tensor) or a tenth of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from axsparse.samo.optim.hyper import Hyper

if TYPE_CHECKING:
    from axsparse.samo.cuda.step_kernel import TensorSlot


@dataclass(frozen=True)
class Block:
    """A stretch of kept entries of one tensor, in the middle of an update."""

    grad: Tensor
    """Unscaled and clipped; the same in all parts of a step, so none of them changes it."""
    master: Tensor
    """The weights before the step, until `apply` moves them."""
    moments: Mapping[str, Tensor]


@dataclass(frozen=True)
class Optimizer:
    """An update rule in three parts; a new optimizer is one file that fills these in."""

    moments: tuple[str, ...]
    """Names of the fp32 states, one value a kept entry each; zero before the first step."""
    update_moments: Callable[[Block, Hyper], None]
    """`(block, hyper)`: fold the gradient into the moments, in place."""
    statistics: Callable[[Block, Hyper], Tensor] | None
    """`(block, hyper)`: fp64 sums of a block, `(num_statistics,)`, that are added up over the
    whole tensor (over its shards, too) before `apply`; None if the rule is elementwise."""
    apply: Callable[[Block, Tensor | None, Hyper], None]
    """`(block, statistics, hyper)`: move the master weights, in place."""
    num_statistics: int = 0
    """How many sums `statistics` gives."""
    fused: Callable[[Sequence[TensorSlot], Hyper, float], None] | None = None
    """`(slots, hyper, gradient factor)`: the same by kernels, on a GPU; None where there are
    none."""
