"""Where in its schedule a run stands, and the learning rate that follows from that."""

from __future__ import annotations

from axsparse.config.schema import Config
from axsparse.samo.optim.learning_rate import learning_rate


class Position:
    """The counters of a run, between two steps; the same on all ranks."""

    def __init__(self, config: Config) -> None:
        """`config` has every `auto` resolved."""
        self.steps_done = 0
        """Steps since the run began, skipped ones included."""
        self.updates = 0
        """Steps that updated the weights since the last rewinding."""
        self.jumped = 0
        """Batches that an earlier version of axsparse left out after spikes of the loss."""
        self.schedule_start = 0
        """The value of `steps_done` at the last rewinding, where the learning rate began anew."""
        self.masks_changed: int | None = None
        """The value of `steps_done` at the last change of masks; None before the first."""
        self._config = config

    @property
    def batch(self) -> int:
        """The number, from 0, of the batch that the coming step reads."""
        return self.steps_done + self.jumped

    @property
    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return self.rate_of(self._config.optimizer.learning_rate)

    def rate_of(self, peak: float) -> float:
        """The learning rate of the coming step for parameters with this peak.

        After a rewinding the schedule begins anew, and its descent ends where it would have
        ended without the rewinding. After a change of masks the rate rises linearly to the
        schedule's over `pruning.rewarm_steps` steps.
        """
        schedule = self._config.schedule
        assert schedule.decay_steps != "auto", "the configuration is resolved"
        rewarming = 1.0
        if self.masks_changed is not None and self._config.pruning.rewarm_steps:
            since = self.steps_done - self.masks_changed + 1
            rewarming = min(1.0, since / self._config.pruning.rewarm_steps)
        return rewarming * learning_rate(
            self.steps_done - self.schedule_start,
            schedule,
            peak=peak,
            decay_steps=max(schedule.decay_steps - self.schedule_start, schedule.warmup_steps, 1),
        )

    def follow_masks(self, *, rewound: bool, changed: bool) -> None:
        """Take note that the masks before the coming step were rewound or changed."""
        if rewound:
            self.updates, self.schedule_start = 0, self.steps_done
        if changed:
            self.masks_changed = self.steps_done
