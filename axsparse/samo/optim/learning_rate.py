"""Learning-rate schedules: linear warm-up, then decay (Brown et al. 2020, appendix B) or steps."""

from __future__ import annotations

import math

from axsparse.config.schema import ScheduleConfig


def learning_rate(step: int, schedule: ScheduleConfig, *, peak: float, decay_steps: int) -> float:
    """The learning rate of step `step` (from 0); a pure function, so resuming needs no state.

    `decay_steps` stands for that of the schedule, which may be `auto` and counts from the start of
    the run, not from `step` 0.

    η(t) = peak · (t + 1) / warmup                              t < warmup
    η(t) = peak · (final + (1 − final) · shape(x)),             after
           x = (t − warmup) / (decay − warmup), at most 1
    shape(x) = (1 + cos πx) / 2,  1 − x  or  1

    η(t) = peak · factor^⌊t / every⌋                            after, if the decay is `step`
    """
    warmup_steps, final_ratio = schedule.warmup_steps, schedule.final_ratio
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule.decay == "step":
        return float(peak * schedule.step_factor ** (step // schedule.step_every))
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    shapes = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
    }
    return peak * (final_ratio + (1 - final_ratio) * shapes[schedule.decay])
