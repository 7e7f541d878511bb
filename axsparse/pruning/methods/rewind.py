"""Rewinding: kept entries return to the values that they had at an earlier step.

Rewinding to step 0 costs no memory, since the initial weights follow from seed and names. The
weights of any other step are held in fp32 from that step on.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import (
    Change,
    Masking,
    MaskingState,
    MethodState,
    Moment,
    Read,
)
from axsparse.runtime.errors import DataError
from axsparse.samo.layer_construction import fill, start_values

KIND = "rewind"
"""The kind under which the weights are saved."""


class Rewinding:
    """A pruning method after which, whenever it has changed the masks, the weights go back.

    They go back to those of one step, not later than the first pruning.
    """

    def __init__(self, method: Masking, live: LiveMasks, step: int) -> None:
        self._method = method
        self._live = live
        self._step = step
        self._held: dict[str, Tensor] = {}
        """The flat weights of that step by global name, whole, since nothing is pruned before."""
        self._holds = False
        """Whether that step has come; a stage without trained weights holds none even then."""

    @property
    def unfinished(self) -> str | None:
        return self._method.unfinished

    def before_step(self, now: Moment) -> Change | None:
        if now.step == self._step != 0:
            self._hold()
        change = self._method.before_step(now)
        if change is None or not change.changed:
            return change
        self._rewind()
        return replace(change, rewound=True)

    def state(self) -> MaskingState:
        """The state of the method, with the weights as long as it may still rewind to them."""
        state = self._method.state()
        if state.standing.is_done or not self._holds:
            return state
        standing = replace(state.standing, holds_weights=True)
        return MaskingState(standing, {**state.tensors, KIND: self._held})

    def restore(self, standing: MethodState, read: Read) -> None:
        self._method.restore(standing, read)
        if not standing.holds_weights:
            return
        self._holds = True
        live = self._live
        for layer in live.layers:
            for tensor in layer.state.owned:
                # A weight with two uses is saved under the name of the first.
                values = read(KIND, live.ties.get(tensor.name, tensor.name))
                numel = tensor.parameter.numel()
                if values.shape != (numel,):
                    raise DataError(
                        f"checkpoint: the weights of {tensor.name} to rewind to are "
                        f"{values.numel()}, not {numel}; resume from another checkpoint"
                    )
                self._held[tensor.name] = values

    def _hold(self) -> None:
        self._holds = True
        for layer in self._live.layers:
            for tensor in layer.state.owned:
                assert tensor.kept == tensor.parameter.numel(), f"{tensor.name} is pruned already"
                self._held[tensor.name] = layer.state.master(tensor.name).clone()

    def _rewind(self) -> None:
        """Set all weights back and all moments to zero; pruned entries stay pruned."""
        live = self._live
        for layer in live.layers:
            values = start_values(layer.spec, live.ties, live.options) if self._step == 0 else {}
            for tensor in layer.state.owned:
                value = values[tensor.name]() if self._step == 0 else self._held[tensor.name]
                fill(layer.state, tensor, value)
            layer.state.optimizer_state.reset_moments()
