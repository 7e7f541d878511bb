"""One-shot pruning: one mask, drawn at one step from the weights or gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import Change, MaskingState, MethodState, Moment, Read
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState


class OneShot:
    """Prunes once, at `at_step`, by a criterion or by the gradients at that step (SNIP)."""

    unfinished = None

    def __init__(self, live: LiveMasks, criterion: Criterion | None, at_step: int) -> None:
        """Without a `criterion`, `sensitivity` decides."""
        self._live = live
        self._criterion = criterion
        self._at_step = at_step
        self._is_done = False

    def before_step(self, now: Moment) -> Change | None:
        if self._is_done or now.step != self._at_step:
            return None
        self._is_done = True
        criterion = self._criterion
        if criterion is None:
            now.gradients()
            criterion = sensitivity(self._live)
        self._live.prune(self._live.masks(criterion, lambda final: final))
        return Change("pruned", self._live.figures(), is_ticket=True)

    def state(self) -> MaskingState:
        return MaskingState(MethodState(is_done=self._is_done))

    def restore(self, standing: MethodState, read: Read) -> None:
        del read  # the masks come with the saved layers
        self._is_done = standing.is_done


def sensitivity(live: LiveMasks) -> Criterion:
    """Scores entries by |weight × gradient| (SNIP, Lee et al. 2019)."""
    here: Mapping[str, tuple[LayerState, TensorState]] = {
        owner: (state, tensor) for owner, state, tensor in live.pruned()
    }
    for layer in live.layers:
        layer.state.gather_gradient()

    def score(name: str, weight: Tensor) -> Tensor:
        state, tensor = here[name]
        return (state.dense_gradient(tensor.name) * weight).abs_()

    return Criterion(score, pattern=live.pattern)
