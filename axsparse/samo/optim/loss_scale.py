"""Dynamic loss scaling (Micikevicius et al. 2018): keeps small fp16 gradients from becoming zero.

The backward starts from `scale` instead of 1, the update divides by it. A step with a
non-finite gradient anywhere is skipped by all ranks and halves the scale; a run of
`growth_interval` good steps doubles it. Powers of two, so that scaling rounds nothing.

Only kept entries count: a gradient that overflows at a pruned position is dropped by the
compression before gradients are checked, and affects nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 2.0
HIGHEST = 2.0**24
"""The scale stops growing here: beyond it a loss of 1 overflows long before it underflows."""


@dataclass
class LossScale:
    """The scale and its history; the same on every rank, since all ranks agree on every step."""

    scale: float
    floor: float
    """The scale never falls below it."""
    growth_interval: int | None
    """Good steps in a row that double the scale; None keeps it as it is (bf16, fp32)."""
    patience: int
    """Skipped steps in a row at the floor after which a run is lost."""
    good_steps: int = 0
    """Good steps in a row since the scale last changed."""
    skipped_at_floor: int = 0
    """Steps since the last good one that were skipped at the floor or for their loss."""

    @staticmethod
    def none(patience: int) -> LossScale:
        """No scaling: bf16 and fp32 have the range of fp32."""
        return LossScale(scale=1.0, floor=1.0, growth_interval=None, patience=patience)

    def update(self, *, finite: bool, loss_is_finite: bool = True) -> None:
        """Adapt the scale to how a step went: `finite` if all gradients and the loss were.

        A loss that is not finite itself counts as if the scale were at the floor: the scale does
        not enter the forward, so a lower one does not help.
        """
        if finite:
            self.skipped_at_floor = 0
            self.good_steps += 1
            if self.growth_interval is not None and self.good_steps == self.growth_interval:
                self.good_steps = 0
                self.scale = min(self.scale * FACTOR, HIGHEST)
            return
        self.good_steps = 0
        if self.scale <= self.floor or not loss_is_finite:
            self.skipped_at_floor += 1
        self.scale = max(self.scale / FACTOR, self.floor)

    @property
    def exhausted(self) -> bool:
        """Whether the run is lost: too many skipped steps in a row at the floor."""
        return self.skipped_at_floor >= self.patience
