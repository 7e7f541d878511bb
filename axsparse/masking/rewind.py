"""Back to earlier weights: kept entries return to their values of an earlier step.

Step 0 costs nothing, since initial weights follow from seed and names; the weights of any
other step are held in fp32, kept entries only, from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axsparse.masking.live import Live
from axsparse.samo.construct import fill, start_values
from axsparse.samo.index import Index


class Rewinder:
    """Remembers the weights of one step and returns to them as often as it is asked."""

    def __init__(self, live: Live, step: int) -> None:
        self.step = step
        self._live = live
        self._held: dict[str, tuple[Index, Tensor]] = {}

    def note(self, step: int) -> None:
        """Called before every step; holds the weights where it is the one to return to."""
        if step != self.step or step == 0:
            return
        for layer in self._live.layers:
            for tensor in layer.state.owned:
                self._held[tensor.name] = tensor.index, layer.state.master(tensor.name).clone()

    def rewind(self) -> None:
        """Set all weights back, with moments zero; entries pruned since stay pruned."""
        live = self._live
        for layer in live.layers:
            values = start_values(layer.spec, live.ties, live.options) if self.step == 0 else {}
            for tensor in layer.state.owned:
                if self.step == 0:
                    value = values[tensor.name]()
                else:
                    index, values_K = self._held[tensor.name]
                    value = torch.zeros(tensor.parameter.shape)
                    index.scatter(value.view(-1), values_K, 0)
                fill(layer.state, tensor, value)
            layer.state.reset_moments()
