"""Methods that draw masks at fixed steps: once, or in rounds, and with rewinding.

In rounds there are gradual magnitude pruning and the search for lottery tickets. After rewinding,
kept entries have the values that they had at an earlier step. Rewinding to step 0 costs no memory,
since the initial weights follow from seed and names; the weights of any other step are kept in
fp32 from that step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.pruner import (
    MaskUpdate,
    MethodState,
    Pruner,
    PrunerState,
    Read,
    StepContext,
)
from axsparse.samo.layer_construction import fill, start_values
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState


@dataclass(frozen=True)
class PruningRounds:
    """The steps that prune: every `interval` after `begin`, until `until_step`."""

    begin: int
    interval: int
    until_step: int

    @property
    def count(self) -> int:
        """How many rounds there are."""
        return (self.until_step - self.begin) // self.interval

    def number(self, step: int) -> int | None:
        """The number, from 1, of the round that is due after `step` steps; None if none is."""
        number, rest = divmod(step - self.begin, self.interval)
        return None if rest or number < 1 else number


def gradual_sparsity(
    number: int, *, final: float, rounds: int, initial_share: float = 0.0
) -> float:
    """The sparsity after `number` of `rounds` rounds.

    s(r) = final + (initial − final) · (1 − r / rounds)³, where initial = initial_share · final: it
    rises fast at first (Zhu & Gupta 2017, eq. 1). After the last round it is exactly `final`.
    """
    assert 0 <= number <= rounds
    left = (1 - initial_share) * (1 - number / rounds) ** 3
    return final if number == rounds else final * (1 - left)


def iterative_sparsity(number: int, *, final: float, rounds: int) -> float:
    """The sparsity after `number` of `rounds` rounds; 0 before the first.

    1 − s(r) = (1 − final)^(r / rounds): each round removes the same share of what is left
    (Frankle & Carbin 2019, section 1). After the last round it is exactly `final`.
    """
    assert 0 <= number <= rounds
    return final if number == rounds else 1 - (1 - final) ** (number / rounds)


@dataclass
class GradualPruning:
    """Prunes in every round, or once, in the only one."""

    live: LiveMasks
    criterion: Criterion
    rounds: PruningRounds
    sparsity: Callable[..., float] = gradual_sparsity
    """The sparsity of a round, as `gradual_sparsity` and `iterative_sparsity` give it."""
    is_done: bool = False
    unfinished: str | None = None

    def before_step(self, now: StepContext) -> MaskUpdate | None:
        number, rounds = self.rounds.number(now.step), self.rounds.count
        if self.is_done or number is None:
            return None
        self.is_done = number == rounds
        before, criterion = now.loss(), self.criterion
        if criterion.sees_gradients:
            criterion = with_gradients(criterion, self.live, now.gradients())
        masks = self.live.masks(
            criterion, lambda final: self.sparsity(number, final=final, rounds=rounds)
        )
        self.live.prune(masks)
        text = "pruned" if rounds == 1 else f"pruning {number} of {rounds}"
        losses = {"loss_before": before, "loss_after": now.loss()}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        return MaskUpdate(text, {**self.live.figures(), **known}, is_final=self.is_done)

    def state(self) -> PrunerState:
        return PrunerState(MethodState(is_done=self.is_done))

    def restore(self, method_state: MethodState, read: Read) -> None:
        del read  # the masks come with the saved layers
        self.is_done = method_state.is_done


def sensitivity(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
    """Scores entries by |weight × gradient| (SNIP, Lee et al. 2019)."""
    del name
    return (gradient * weight).abs_()


def with_gradients(criterion: Criterion, live: LiveMasks, loss_scale: float) -> Criterion:
    """A criterion whose score is given the gradients that are in the state now, unscaled."""
    here = {owner: (state, tensor) for owner, state, tensor in live.pruned()}
    for layer in live.layers:
        layer.state.gather_gradient()
    own = criterion.score
    assert callable(own)

    def score(name: str, weight: Tensor) -> Tensor:
        state, tensor = here[name]
        gradient = state.dense_gradient(tensor.full_name).div_(loss_scale)
        return own(name, weight, gradient=gradient.view_as(weight))

    return replace(criterion, score=score)


# -- rewinding --------------------------------------------------------------------------

KIND = "rewind"


class Rewinding:
    """A pruning method after which, whenever it has changed the masks, the weights go back to the
    weights of one step, which is not later than the first pruning."""

    def __init__(self, method: Pruner, live: LiveMasks, step: int) -> None:
        self._method = method
        self._live = live
        self._step = step
        self._saved: dict[str, Tensor] = {}
        """The flat weights of that step by global name, dense, since nothing is pruned before."""
        self._has_saved = False
        """Whether that step has come; a stage without trained weights saves none even then."""

    @property
    def unfinished(self) -> str | None:
        return self._method.unfinished

    def before_step(self, now: StepContext) -> MaskUpdate | None:
        if now.step == self._step != 0:
            self._has_saved = True
            for state, tensor in self._tensors():
                assert tensor.full_kept == tensor.full_numel, f"{tensor.name} is pruned already"
                self._saved[tensor.full_name] = state.master(tensor.full_name).clone()
        change = self._method.before_step(now)
        if change is None or not change.changed:
            return change
        self._rewind()
        return replace(change, rewound=True)

    def state(self) -> PrunerState:
        """The state of the method, with the weights as long as it may still rewind to them."""
        state = self._method.state()
        if state.method_state.is_done or not self._has_saved:
            return state
        method_state = replace(state.method_state, holds_weights=True)
        return PrunerState(method_state, {**state.tensors, KIND: self._saved})

    def restore(self, method_state: MethodState, read: Read) -> None:
        self._method.restore(method_state, read)
        self._has_saved = method_state.holds_weights
        for _, tensor in self._tensors() if method_state.holds_weights else ():
            # A weight with two uses is saved under the name of the first.
            name = tensor.full_name
            self._saved[name] = read(KIND, self._live.ties.get(name, name))

    def _tensors(self) -> list[tuple[LayerState, TensorState]]:
        layers = self._live.layers
        return [(layer.state, one) for layer in layers for one in layer.state.by_full_name.values()]

    def _rewind(self) -> None:
        """Set all weights back and all moments to zero; pruned entries stay pruned."""
        live = self._live
        for layer in live.layers:
            values = start_values(layer.spec, live.ties, live.options) if self._step == 0 else {}
            for tensor in layer.state.by_full_name.values():
                name = tensor.full_name
                value = values[name]() if self._step == 0 else self._saved[name]
                fill(layer.state, tensor, value)
                tensor.begun = 0
            layer.state.optimizer_state.reset_moments()
