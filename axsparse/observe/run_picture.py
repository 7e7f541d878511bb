"""The curves of runs as one PNG picture, drawn by matplotlib, for slides and papers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from axsparse.observe.phases import PHASES
from axsparse.observe.run_charts import metrics_of
from axsparse.observe.run_records import Record, number, step_of
from axsparse.observe.run_report import GENERATOR
from axsparse.observe.run_view import RunView
from axsparse.observe.web_page import PHASE_COLOURS, SERIES_COLOURS

SIZE, DOTS = (10.0, 7.0), 150
"""Inches, and dots an inch."""
WIDE = 30
"""Values that differ by more than this factor get a logarithmic axis."""


def run_picture(runs: Sequence[RunView]) -> bytes:
    """A PNG file: loss, what evaluations found, norm of the gradient, and the time of a step by its
    phases (of several runs, the time of a step). ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(SIZE, layout="constrained")
    loss, found, norm, time = figure.subplots(2, 2).flat
    for run, colour in zip(runs, SERIES_COLOURS, strict=False):
        loss.plot(*_points(run.records.steps, "loss"), label=run.name, color=colour)
        loss.plot(*_points(run.records.evaluations, "eval_loss"), "o--", color=colour)
        norm.plot(*_points(run.records.steps, "grad_norm"), color=colour)
    loss.set_title("loss; dashed: validation")
    loss.legend()
    _draw_evaluations(found, runs)
    norm.set_title("norm of the gradient")
    if _is_wide(runs):
        norm.set_yscale("log")
    _draw_times(time, runs)
    for axes in (loss, found, norm, time):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS, metadata={"Software": GENERATOR})
    return file.getvalue()


def _points(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a field, with a gap where it is no number."""
    known = [(step_of(record), number(record, name)) for record in records if name in record]
    return [x for x, _ in known], [float("nan") if y is None else y for _, y in known]


def _draw_evaluations(axes: Any, runs: Sequence[RunView]) -> None:
    """Perplexity of texts, the metrics of other models, or the learning rate without either."""
    evaluations = [record for run in runs for record in run.records.evaluations]
    if any("perplexity" in record for record in evaluations):
        names, records_of, axes_title = ["perplexity"], "evaluations", "validation perplexity"
    elif metrics := list(dict.fromkeys(name for r in evaluations for name in metrics_of(r))):
        names, records_of, axes_title = metrics, "evaluations", "validation, share of targets"
    else:
        names, records_of, axes_title = ["learning_rate"], "steps", "learning rate"
    for run in runs:
        for name in names:
            label = f"{run.name} {name}" if len(runs) > 1 else name
            axes.plot(*_points(getattr(run.records, records_of), name), "o-", ms=3, label=label)
    axes.set_title(axes_title)
    axes.legend()


def _is_wide(runs: Sequence[RunView]) -> bool:
    """Whether norms of gradients differ so much that only a logarithmic axis shows them all."""
    norms = [number(r, "grad_norm") for run in runs for r in run.records.steps]
    known = [norm for norm in norms if norm is not None and norm > 0]
    return bool(known) and max(known) > WIDE * min(known)


def _draw_times(axes: Any, runs: Sequence[RunView]) -> None:
    """Phases over each other for one run, whole steps for several."""
    if len(runs) > 1:
        for run, colour in zip(runs, SERIES_COLOURS, strict=False):
            axes.plot(*_points(run.records.steps, "step_seconds"), color=colour)
        axes.set_title("seconds of a step")
        return
    columns = [_points(runs[0].records.steps, f"{phase}_seconds") for phase in PHASES]
    steps, _ = columns[0]
    colours = [PHASE_COLOURS[phase] for phase in PHASES]
    axes.stackplot(steps, *(values for _, values in columns), labels=PHASES, colors=colours)
    axes.set_title("seconds of a step by phase, mean over ranks")
    axes.legend(fontsize="small", ncols=2)
