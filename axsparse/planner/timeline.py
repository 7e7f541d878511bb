"""Turns a simulated step into the spans of a trace, as a real run records them."""

from __future__ import annotations

from collections.abc import Iterator

from axsparse.observe.trace_file import Span
from axsparse.pipeline.policy import Kind
from axsparse.pipeline.simulator import StageRun
from axsparse.planner.layout import Row


def spans(row: Row) -> list[Span]:
    """The spans of all stages of the replicas that were simulated.

    Where a stage does nothing, there is a span of its bubble. A stage compresses at the end of each
    backward, or of the weight gradients of a split one. All stages update after the slowest
    all-reduce, as in `simulate_step`.
    """
    return [
        span
        for replica, pipeline in row.run.pipelines.items()
        for stage, run in enumerate(pipeline.stages)
        for span in _whole(row, replica, stage, run)
    ]


def _whole(row: Row, replica: int, stage: int, run: StageRun) -> Iterator[Span]:
    """The spans of one stage in order of time, with bubbles in between."""
    now = 0.0
    for phase, name, begin, end in sorted(_busy(row, stage, run), key=lambda each: each[2]):
        if begin > now:
            yield Span(1, replica, stage, "bubble", "bubble", now, begin)
        if end > begin:
            yield Span(1, replica, stage, phase, name, begin, end)
        now = max(now, end)
    if row.seconds > now:
        yield Span(1, replica, stage, "bubble", "bubble", now, row.seconds)


def _busy(row: Row, stage: int, run: StageRun) -> Iterator[tuple[str, str, float, float]]:
    """Phase, name, begin and end of all that a stage does, in no order."""
    costs = row.costs.stages[stage]
    is_split = row.layout.schedule.split_backward
    last = Kind.WEIGHT if is_split else Kind.BACKWARD
    whole = costs.weight if is_split else costs.backward
    share = costs.compress / whole if whole else 0.0
    for action, begin, end in zip(run.actions, run.begins, run.ends, strict=True):
        # Jitter lengthens compression like everything else.
        compress = share * (end - begin) if action.kind is last else 0.0
        yield "compute", str(action), begin, end - compress
        yield "compress", str(action), end - compress, end
    for begin, end in run.handled:
        yield "p2p", "p2p", begin, end
    column = max(pipeline.stages[stage].end for pipeline in row.run.pipelines.values())
    yield "collective", "collective", column, column + row.costs.all_reduce[stage]
    updated = row.seconds - max(row.costs.optimizer)
    yield "optimizer", "optimizer", updated, updated + row.costs.optimizer[stage]
