"""Rewinding: kept entries return to the values that they had at an earlier step.

Rewinding to step 0 costs no memory, since the initial weights follow from seed and names. The
weights of any other step are held in fp32 from that step on.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import MaskingState, MethodState, Read
from axsparse.runtime.errors import DataError
from axsparse.samo.layer_construction import fill, start_values

KIND = "rewind"
"""The kind under which the weights are saved."""


class Rewinder:
    """Holds the weights of one step and returns to them as often as it is asked to."""

    def __init__(self, live: LiveMasks, step: int) -> None:
        self.step = step
        self._live = live
        self.held: dict[str, Tensor] = {}
        """The flat weights of that step by global name; they are whole, since nothing is pruned
        before it."""
        self.holds = False
        """Whether that step has come; a stage without trained weights holds none even then."""

    def note(self, step: int) -> None:
        """Hold the weights if this is the step to return to; called before every step."""
        if step != self.step or step == 0:
            return
        self.holds = True
        for layer in self._live.layers:
            for tensor in layer.state.owned:
                assert tensor.kept == tensor.parameter.numel(), f"{tensor.name} is pruned already"
                self.held[tensor.name] = layer.state.master(tensor.name).clone()

    def restore(self, read: Read) -> None:
        """Hold the weights that another run saved; DataError if they do not fit.

        A weight with two uses is saved under the name of the first.
        """
        self.holds = True
        live = self._live
        for layer in live.layers:
            for tensor in layer.state.owned:
                values = read(KIND, live.ties.get(tensor.name, tensor.name))
                numel = tensor.parameter.numel()
                if values.shape != (numel,):
                    raise DataError(
                        f"checkpoint: the weights of {tensor.name} to rewind to are "
                        f"{values.numel()}, not {numel}; resume from another checkpoint"
                    )
                self.held[tensor.name] = values

    def rewind(self) -> None:
        """Set all weights back and all moments to zero; pruned entries stay pruned."""
        live = self._live
        for layer in live.layers:
            values = start_values(layer.spec, live.ties, live.options) if self.step == 0 else {}
            for tensor in layer.state.owned:
                value = values[tensor.name]() if self.step == 0 else self.held[tensor.name]
                fill(layer.state, tensor, value)
            layer.state.optimizer_state.reset_moments()


def with_weights(state: MaskingState, rewinder: Rewinder | None) -> MaskingState:
    """The state of a method, with the weights that its rewinder still needs, if any."""
    if rewinder is None or state.standing.is_done or not rewinder.holds:
        return state
    standing = replace(state.standing, holds_weights=True)
    return MaskingState(standing, {**state.tensors, KIND: rewinder.held})


def restore_weights(rewinder: Rewinder | None, standing: MethodState, read: Read) -> None:
    """Give the rewinder back the weights that `with_weights` saved."""
    if rewinder is not None and standing.holds_weights:
        rewinder.restore(read)
