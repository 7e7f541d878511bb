"""The compute, memory and messages of one stage, by which the planner counts bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from axsparse.planner.cluster import Precision
from axsparse.runtime.communication import NO_SUM, Sums
from axsparse.samo.state_bytes import StateBytes


def no_bytes(_: int) -> float:
    """No bytes, whatever the number of samples."""
    return 0.0


@dataclass(frozen=True)
class StageLoad:
    """The compute, memory and messages of one stage of one replica.

    Numbers "for a sample" are multiplied by the microbatch size where they are used.
    """

    layers: str
    """The stage's layers, as text for users."""
    flops: float
    """Flops of the forward, for a sample."""
    moved: float
    """Bytes that the forward writes to memory, for a sample."""
    again_flops: float
    """The part of `flops` that the backward recomputes."""
    again_moved: float
    """The part of `moved` that the backward writes again."""
    trained: int
    """Trained parameters: entries of the dense gradients of a backward."""
    kept: int
    """Trained parameters that are not pruned: gradient entries that are reduced and updated."""
    state: StateBytes
    """Bytes of model state on one rank, sharded or not."""
    temporary: float
    """Bytes of one layer's dense gradient, and of copies that the optimizer makes."""
    building: float
    """Bytes in addition to the state while it is built: the largest tensor's start values in fp32,
    and the temporaries of scoring a tensor by its gradient."""
    saved: float
    """Bytes that a rank holds for a checkpoint while training continues."""
    held: float
    """Bytes of activations from a forward to its backward, for a sample."""
    working: float
    """Bytes of one layer's activations while its backward runs, for a sample."""
    outputs: float
    """Bytes that go to the next stage and come back as gradients, for a sample. A teacher's are
    among them, which do not come back."""
    sum_bytes: int | None = None
    """Bytes in which replicas sum a gradient entry; None for the bytes of a weight."""
    numbers: range = range(0)
    """The numbers of the stage's layers in the model; empty where a formula has no layers."""
    calibration: Callable[[int], float] = no_bytes
    """Bytes, by the samples of a microbatch, of drawing masks from calibration samples before there
    is state."""
    deferred: float = 0.0
    """Bytes from a split backward to its weight gradients, for a sample."""
    weight_flops: float = 0.0
    """Flops of the weight gradients that a split backward leaves for later, for a sample."""
    loss_bytes: Callable[[int], float] = no_bytes
    """Bytes of the loss, by the samples of a microbatch. They do not grow in proportion where the
    loss computes some of its logits at a time."""
    taught_flops: float = 0.0
    """Flops of the forward of the teacher's layers, for a sample; they are not among `flops`."""
    taught_moved: float = 0.0
    """Bytes that this forward writes to memory, for a sample."""
    expanded: float = 0.0
    """Bytes of the weights that are sparse at rest, once dense: each microbatch writes them before
    its forward and before its backward."""
    gathered: float = 0.0
    """Bytes of the kept weights that replicas gather before each forward and each backward but a
    step's first."""
    forward_sums: Sums = NO_SUM
    """The sums over tensor-parallel ranks in a forward."""
    backward_sums: Sums = NO_SUM
    """The same in a backward, layers that it computes again included."""

    @property
    def deferred_size(self) -> float:
        """The memory of a deferred microbatch, in units of one in flight."""
        return self.deferred / self.held if self.deferred and self.held else 1.0


Fits: TypeAlias = Callable[[int, StageLoad], bool]
"""`fits(stage, load)` says whether a rank has memory for this load on the stage of this number."""


def value_bytes(precision: Precision) -> int:
    """Bytes of one number."""
    return 4 if precision == "fp32" else 2
