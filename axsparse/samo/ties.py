"""Tied weights, which two layers use, as one stage sees them."""

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
        """This use's kept gradient, a view."""
        return self.layer.gradient_of(self.tensor)

    def gradient_to_change(self) -> Tensor:
        """The kept gradient, for a caller that adds the other use's to it in place. Sums of
        squares that came with it no longer hold."""
        self.tensor.partials = None
        return self.gradient


@dataclass(frozen=True)
class StageTie:
    """A tie as one stage sees it: both uses, or one use and the pair of stages that hold them."""

    uses: tuple[Use, ...]
    pair: Collective | None
    """Joins the stages of the first and the second use, in order; None if both uses are here."""
