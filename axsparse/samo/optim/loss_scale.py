"""Dynamic loss scaling (Micikevicius et al. 2018): keeps fp16 gradients out of the zeros.

The backward starts from `scale` instead of 1, the update divides by it. A step with a
non-finite gradient anywhere is skipped by all ranks and halves the scale; a run of
`growth_interval` good steps doubles it. Powers of two, so that scaling rounds nothing.

Only kept entries count: a gradient that overflows at a pruned position is thrown away by
the compression before anybody looks at it, and cannot spoil anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FACTOR = 2.0
HIGHEST = 2.0**24
"""The scale stops growing here: beyond it a loss of 1 overflows long before it underflows."""


@dataclass
class LossScale:
    """The scale and its history; the same on every rank, since all see the same verdicts."""

    scale: float
    floor: float
    """The scale never falls below it."""
    growth_interval: int | None
    """Good steps in a row that double the scale; None keeps it as it is (bf16, fp32)."""
    patience: int
    """Skipped steps in a row at the floor after which a run is lost."""
    good_steps: int = field(default=0)
    skipped_at_floor: int = field(default=0)

    @staticmethod
    def none(patience: int) -> LossScale:
        """No scaling: bf16 and fp32 have the range of fp32."""
        return LossScale(scale=1.0, floor=1.0, growth_interval=None, patience=patience)

    def update(self, *, finite: bool, loss_is_finite: bool = True) -> None:
        """Take in how a step went.

        A loss that is not finite itself counts as if the scale were at the floor: the
        forward knows no scale, so that a lower one mends nothing.
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
        """Whether nothing is left to try."""
        return self.skipped_at_floor >= self.patience
