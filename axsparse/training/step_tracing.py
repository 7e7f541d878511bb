"""Chooses the steps of a run that are traced."""

from __future__ import annotations

from axsparse.config.schema import Config
from axsparse.observe.trace_recorder import TraceRecorder
from axsparse.training.parts import Parts


def make_tracing(config: Config, parts: Parts, steps_done: int) -> TraceRecorder | None:
    """Traces some steps, but not this run's first, which allocates and compiles; None if no step
    is to be traced, or there is no run directory."""
    wanted, folder = config.train.trace, parts.run_dir
    if wanted == 0 or folder is None:
        return None
    last = min(steps_done + 1 + wanted, config.train.steps)
    first = min(steps_done + 2, last)
    steps = range(first, last + 1)
    return TraceRecorder(parts.transport, parts.place, parts.phases, folder, steps)
