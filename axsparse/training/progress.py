"""How far a run is: its steps count in `Progress`, and its checkpoints store that object.

A step is skipped if its loss or a gradient is not finite.

Dynamic loss scaling (Micikevicius et al. 2018) keeps small fp16 gradients from becoming zero. The
backward starts from the loss scale instead of 1, the update divides by it. A skipped step halves
the scale; `growth_interval` good steps in a row double it. Powers of two, so that scaling rounds
nothing. Only kept entries count: a gradient that overflows at a pruned position is dropped by the
compression before gradients are checked, and affects nothing.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from axsparse.config.schema import Config
from axsparse.pruning.methods.pruner import MaskUpdate
from axsparse.samo.optim.optimizer import LearningRate, learning_rate, own_learning_rate

FACTOR = 2.0
LOWEST = 1.0
HIGHEST = 2.0**24
"""The loss scale stops growing here: beyond it a loss of 1 overflows long before it underflows."""

Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Counters(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FirstBad(_Counters):
    """The first of a row of steps that were skipped because loss or gradient was not finite."""

    step: Count
    """The number of the step, from 1."""
    what: Annotated[str, Field(pattern=r"\A[^\p{C}]*\z", max_length=1000)]
    """The rank and the tensor whose value was first not finite, and its value."""


class BestEntry(_Counters):
    """The evaluation of lowest loss, whose checkpoint is kept (`checkpoint.keep_best`)."""

    step: Count
    """Steps done before it."""
    loss: float
    data: str | None = None
    """The evaluated part of the validation data; None if unknown."""


class Progress(_Counters):
    """The counters of a run, the same on all ranks; a checkpoint stores their values between two
    steps."""

    step: Count
    """Number of steps done, skipped ones included."""
    updates: Count
    """Number of updates of the weights, counted anew when they are rewound to earlier ones."""
    schedule_start: Count
    """Steps done when the weights were last rewound and the learning rate began anew."""
    masks_changed: Count | None
    """Steps done when the masks last changed; None if they never have."""
    evaluated: bool
    """Whether the evaluation that is due after these steps has been done."""
    masked: bool
    """Whether the change of masks that is due before the next step has been done."""
    loss_scale: Annotated[float, Field(gt=0.0, lt=2.0**128)]
    good_steps: Count
    """Good steps in a row since the loss scale last changed."""
    skipped_at_floor: Count
    """Steps since the last good one that were skipped at the smallest scale or for their loss."""
    not_finite: Count = 0
    """Number of steps skipped because loss or gradient was not finite."""
    last_good: Count = 0
    """The last step that updated the weights; 0 before the first. Its loss was computed with the
    weights of the step before: weights that were saved before this step are known to train, later
    ones are not yet."""
    exponents: dict[str, Annotated[int, Field(ge=-400, le=400)]] = {}
    """By parameter, the base-2 logarithm of the unit of its exact sum in the next step
    (`samo/fixed_point.py`); empty where sums are not exact."""
    first_bad: FirstBad | None = None
    """The first of the steps in a row that were skipped at the smallest loss scale."""
    best: BestEntry | None = None
    """The best evaluation; None before the first, and if none is looked for."""

    @classmethod
    def at_start(cls, config: Config) -> Progress:
        """The progress of a run that has done nothing yet.

        The loss scale is a power of two, and 1 for types with the range of fp32.
        """
        initial = config.loss_scale.initial if config.precision == "fp16" else 1.0
        return cls(
            step=0,
            updates=0,
            schedule_start=0,
            masks_changed=None,
            evaluated=False,
            masked=False,
            loss_scale=2.0 ** math.floor(math.log2(initial)),
            good_steps=0,
            skipped_at_floor=0,
        )

    def learning_rate(self, config: Config, own: LearningRate | None, peak: float) -> float:
        """The learning rate of the coming step for parameters with this peak.

        After a rewinding the schedule begins anew, and its descent ends where it would have
        ended without the rewinding. After a change of masks the rate rises linearly to the
        schedule's over `pruning.rewarm_steps` steps. A function of the user's own stands for all of
        the schedule; for a parameter with another peak, the rate that it gives is scaled in
        proportion to the peak. `config` has every `auto` resolved.
        """
        schedule = config.schedule
        assert schedule.decay_steps != "auto", "the configuration is resolved"
        rewarming = 1.0
        if self.masks_changed is not None and config.pruning.rewarm_steps:
            since = self.step - self.masks_changed + 1
            rewarming = min(1.0, since / config.pruning.rewarm_steps)
        step = self.step - self.schedule_start
        if own is not None:
            usual = config.optimizer.learning_rate
            return rewarming * own_learning_rate(own, step) * (peak / usual)
        return rewarming * learning_rate(
            step,
            schedule,
            peak=peak,
            decay_steps=max(schedule.decay_steps - self.schedule_start, schedule.warmup_steps, 1),
        )

    def end_step(self, *, is_skipped: bool) -> None:
        """Count a step; the work between two steps has not been done after it."""
        self.step += 1
        if is_skipped:
            self.not_finite += 1
        else:
            self.last_good = self.step
        self.evaluated = self.masked = False

    def follow_masks(self, change: MaskUpdate) -> None:
        """Take note that the masks before the coming step were rewound or changed."""
        if change.rewound:
            self.updates, self.schedule_start = 0, self.step
        if change.changed:
            self.masks_changed = self.step
            # Losses of a network with other masks say nothing about this one.
            self.best = None

    def rescale(self, config: Config, *, finite: bool, loss_is_finite: bool = True) -> None:
        """Adapt the loss scale to how a step went: `finite` if all gradients and the loss were.

        A loss that is not finite itself counts as if the scale were the lowest: the scale does not
        enter the forward, so a lower one does not help.
        """
        if finite:
            self.skipped_at_floor = 0
            self.good_steps += 1
            interval = config.loss_scale.growth_interval
            if config.precision == "fp16" and self.good_steps >= interval:
                self.good_steps = 0
                self.loss_scale = max(self.loss_scale, min(self.loss_scale * FACTOR, HIGHEST))
            return
        self.good_steps = 0
        if self.loss_scale <= LOWEST or not loss_is_finite:
            self.skipped_at_floor += 1
        self.loss_scale = max(self.loss_scale / FACTOR, LOWEST)

    def look(self, loss: float, data: str | None = None) -> None:
        """Take note of the loss of an evaluation here, over some `data`; among equal losses the
        first is best.

        A checkpoint holds the masks that are drawn after the evaluation of its step, and an
        evaluation from before the network lost entries counts no more, since a dense network would
        stay the best for ever.
        """
        is_lower = self.best is None or loss < self.best.loss
        if self.step > 0 and math.isfinite(loss) and is_lower:
            self.best = BestEntry(step=self.step, loss=loss, data=data)

    @property
    def is_best(self) -> bool:
        """Whether the evaluation after the last step is the best one."""
        return self.best is not None and self.best.step == self.step
