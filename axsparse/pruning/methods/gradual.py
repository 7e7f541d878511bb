"""Pruning in several steps: gradual magnitude, and lottery tickets with rewinding."""

from __future__ import annotations

from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import Change, MaskingState, MethodState, Moment, Read
from axsparse.pruning.methods.rewind import Rewinder, restore_weights, with_weights
from axsparse.pruning.sparsity_schedule import gradual_sparsity, iterative_sparsity


class GradualPruning:
    """Prunes every `interval` steps, and last at `until_step`; kept entries only become fewer."""

    unfinished = None

    def __init__(
        self,
        live: LiveMasks,
        criterion: Criterion,
        *,
        begin: int,
        interval: int,
        until_step: int,
        geometric: bool,
        rewinder: Rewinder | None,
    ) -> None:
        """`geometric` removes the same part of what is left each time, otherwise sparsity rises
        as a cubic. At least one interval fits between `begin` and `until_step`.
        """
        self._rounds = (until_step - begin) // interval
        assert self._rounds >= 1
        self._live = live
        self._criterion = criterion
        self._begin, self._interval = begin, interval
        self._geometric = geometric
        self._rewinder = rewinder
        self._is_done = False

    def before_step(self, now: Moment) -> Change | None:
        if self._is_done:
            return None
        if self._rewinder is not None:
            self._rewinder.note(now.step)
        number, rest = divmod(now.step - self._begin, self._interval)
        if rest or number < 1:
            return None
        self._is_done = number == self._rounds
        self._live.prune(
            self._live.masks(self._criterion, lambda final: self._sparsity(number, final))
        )
        if self._rewinder is not None:
            self._rewinder.rewind()
        return Change(
            f"pruning {number} of {self._rounds}",
            self._live.figures(),
            rewound=self._rewinder is not None,
            is_ticket=self._is_done,
        )

    def state(self) -> MaskingState:
        return with_weights(MaskingState(MethodState(is_done=self._is_done)), self._rewinder)

    def restore(self, standing: MethodState, read: Read) -> None:
        self._is_done = standing.is_done
        restore_weights(self._rewinder, standing, read)

    def _sparsity(self, number: int, final: float) -> float:
        if self._geometric:
            return iterative_sparsity(number, final=final, rounds=self._rounds)
        return gradual_sparsity(number, final=final, begin=0, end=self._rounds, every=1)
