"""What is trained, as sizes alone: what each stage of a layout computes, holds and sends.

A workload is any model with the method it is trained by; `gpt_formula` has the paper's
GPTs, `surveyed` every model that has been looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from axsparse.planner.cluster import Precision
from axsparse.samo.state_bytes import StateBytes


@dataclass(frozen=True)
class StageLoad:
    """One stage of one replica. Everything "a sample" grows with the microbatch."""

    layers: str
    """What stands on it, for people."""
    flops: float
    """Of a sample's forward."""
    moved: float
    """Bytes that a sample's forward leaves behind, beside what the flops take."""
    again_flops: float
    """Of `flops`, what the backward computes again."""
    again_moved: float
    trained: int
    """Entries of the dense gradients of a backward."""
    kept: int
    """Entries of those that are accumulated, reduced and updated."""
    state: StateBytes
    """Of one rank, sharded or not."""
    temporary: float
    """Bytes of one layer's dense gradient, and of copies that the optimizer makes."""
    building: float
    """Bytes beside the state while it is made: the largest tensor's start values, fp32."""
    saved: float
    """Bytes that a rank holds for a checkpoint while training goes on."""
    held: float
    """Bytes that a sample holds from its forward to its backward."""
    working: float
    """Bytes of a sample while its backward runs, for one layer."""
    logits: float
    """Bytes of a sample for the loss; 0 before the last stage."""
    outputs: float
    """Bytes of a sample that go to the next stage, and come back as gradients."""


Fits: TypeAlias = Callable[[int, StageLoad], bool]
"""`(stage, load)`: whether a rank has room for it."""


class Workload(Protocol):
    """A model and how it is trained."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def precision(self) -> Precision:
        """Of weights, activations, messages and the exchange of gradients."""
        ...

    @property
    def is_pruned(self) -> bool:
        """Whether backwards compress their gradients."""
        ...

    @property
    def sample_flops(self) -> float:
        """Of a sample's forward and backward, recomputation included: what peak is counted by."""
        ...

    @property
    def most_stages(self) -> int:
        """A pipeline cannot have more."""
        ...

    def stages(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[StageLoad] | None:
        """The loads of the stages, the dearest as cheap as can be; None if no split fits.

        `microbatches` of a replica may decide in which precision gradients add up.
        """
        ...


def value_bytes(precision: Precision) -> int:
    """Of one number."""
    return 4 if precision == "fp32" else 2
