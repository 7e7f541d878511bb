"""Tied weights as one stage sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from axsparse.runtime.communication import Collective
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState


@dataclass(frozen=True)
class Use:
    """One use of a tied weight on this stage."""

    layer: LayerState
    tensor: TensorState

    @property
    def gradient(self) -> Tensor:
        return self.layer.gradient_of(self.tensor)

    def summed(self) -> Tensor:
        """The gradient, to which the other use's is about to be added."""
        self.tensor.partials = None
        return self.gradient


@dataclass(frozen=True)
class StageTie:
    """A tie as one stage sees it: both uses, or one use and the pair of stages that hold them."""

    uses: tuple[Use, ...]
    pair: Collective | None
    """Joins the stage of the first use and that of the second, in this order; None if both
    uses are here."""
