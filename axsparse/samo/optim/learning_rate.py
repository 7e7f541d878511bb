"""Learning-rate schedules: linear warm-up, then decay (Brown et al. 2020, appendix B) or steps."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    decay_steps: int,
    decay: Literal["cosine", "linear", "constant", "step"],
    final_ratio: float,
    step_every: int,
    step_factor: float,
) -> float:
    """The learning rate of step `step` (from 0); a pure function, so resuming needs no state.

    η(t) = peak · (t + 1) / warmup                              t < warmup
    η(t) = peak · (final + (1 − final) · shape(x)),             after
           x = (t − warmup) / (decay − warmup), at most 1
    shape(x) = (1 + cos πx) / 2,  1 − x  or  1

    η(t) = peak · factor^⌊t / every⌋                            after, if the decay is `step`
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if decay == "step":
        return float(peak * step_factor ** (step // step_every))
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    shapes = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
    }
    return peak * (final_ratio + (1 - final_ratio) * shapes[decay])
