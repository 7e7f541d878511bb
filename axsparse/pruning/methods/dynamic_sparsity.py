"""Dynamic sparsity: masks move at constant density while the network trains (SET, RigL)."""

from __future__ import annotations

import torch

from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import Change, MaskingState, MethodState, Moment, Read
from axsparse.pruning.methods.regrowth import Regrowth
from axsparse.pruning.sparsity_schedule import drop_fraction


class DynamicSparsity:
    """Exchanges kept entries every `interval` steps, after the step's update.

    If that step is skipped, they are exchanged after the next one that updates.
    """

    unfinished = None

    def __init__(
        self, live: LiveMasks, regrowth: Regrowth, *, interval: int, until_step: int, alpha: float
    ) -> None:
        """`alpha` is the fraction that is exchanged at first; it falls to 0 at `until_step`."""
        self._live = live
        self._regrowth = regrowth
        self._interval = interval
        self._until = until_step
        self._alpha = alpha
        self._armed_at = 0

    def before_step(self, now: Moment) -> Change | None:
        change = None
        if self._regrowth.is_armed and now.updates > self._armed_at:
            change = self._moved(now.step, self._regrowth.regrow(now.step))
        coming = now.step + 1
        if coming % self._interval == 0 and not self._regrowth.is_armed:
            fraction = drop_fraction(coming, alpha=self._alpha, end=self._until)
            if fraction > 0:
                self._regrowth.arm(fraction)
                self._armed_at = now.updates
        return change

    def state(self) -> MaskingState:
        """The candidates for growth are not saved: `before_step` has used those of a step that
        updated, and those of a skipped step are forgotten anyway."""
        return MaskingState(MethodState(armed=self._regrowth.fraction, armed_at=self._armed_at))

    def restore(self, standing: MethodState, read: Read) -> None:
        del read  # the masks come with the saved layers
        self._armed_at = standing.armed_at
        if standing.armed is not None:
            self._regrowth.arm(standing.armed)

    def _moved(self, step: int, counts: dict[str, int]) -> Change:
        live = self._live
        own = [counts[tensor.name] for _, _, tensor in live.counted()]
        moved = int(live.total(torch.tensor([sum(own)])))
        is_last = drop_fraction(step + self._interval, alpha=self._alpha, end=self._until) == 0
        return Change(
            f"{moved} kept entries moved", {"moved": moved, **live.figures()}, is_ticket=is_last
        )
