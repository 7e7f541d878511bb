"""The charts of one run, or of several over each other, as data that `observe.charts` draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from axsparse.observe.charts import Areas, Bars, Chart, Curve, Lines, Timeline, thinned
from axsparse.observe.metrics import perplexity
from axsparse.observe.phases import PHASES
from axsparse.observe.run_records import Record, RunView, number, step_of
from axsparse.observe.web_page import PHASE_COLOURS, SERIES_COLOURS
from axsparse.runtime.console import Unit

MOST_POINTS = 200
"""Of a curve; with several runs fewer, so that the page stays below 1 MB."""
MOST_COLUMNS = 80
"""Stretches of steps in a chart of phases; with several runs fewer."""


def most_of(of_one: int, runs: Sequence[RunView]) -> int:
    """How much is drawn of each run, if so much is drawn of one that is alone."""
    return max(16, 2 * of_one // (1 + len(runs)))


def colours_of(runs: Sequence[RunView]) -> dict[str, str]:
    """The colour of each run, by its name."""
    return dict(zip((run.name for run in runs), SERIES_COLOURS, strict=False))


def training_charts(runs: Sequence[RunView]) -> Iterator[Lines]:
    """Loss, perplexity, metrics, learning rate, norm of the gradient, loss scale and rate."""
    colours, most = colours_of(runs), most_of(MOST_POINTS, runs)

    def of_steps(name: str, change: Callable[[float], float | None] = float) -> list[Curve]:
        return [
            Curve(run.name, _points(run.records.steps, name, most, change), colours[run.name])
            for run in runs
        ]

    def of_evaluations(name: str) -> list[Curve]:
        return [
            Curve(
                f"{run.name} validation",
                _points(run.records.evaluations, name, most),
                colours[run.name],
                is_dashed=True,
                is_marked=True,
            )
            for run in runs
        ]

    skipped = {step_of(r) for run in runs for r in run.records.steps if r.get("skipped")}
    crosses = sorted(skipped)[:: max(1, len(skipped) // most)]
    evaluations = [record for run in runs for record in run.records.evaluations]
    has_tokens = any(number(record, "perplexity") is not None for record in evaluations)
    unit = ", nats a token" if has_tokens else ""
    losses = [*of_steps("loss"), *of_evaluations("eval_loss")]
    yield Lines(f"loss{unit}; dashed: validation", losses, crosses=crosses)
    if has_tokens:
        curves = [*of_steps("loss", _finite_perplexity), *of_evaluations("perplexity")]
        yield Lines("perplexity; dashed: validation", curves, logarithmic=True)
    for name in dict.fromkeys(name for record in evaluations for name in metrics_of(record)):
        yield Lines(f"{name}, share of targets; validation", of_evaluations(name))
    yield Lines("learning rate", of_steps("learning_rate"))
    norms = Lines("norm of the gradient", of_steps("grad_norm"), crosses=crosses)
    yield replace(norms, logarithmic=_is_wide(norms))
    scales = Lines("loss scale", of_steps("loss_scale"), logarithmic=True)
    if any(scale != 1 for of_one in scales.values for scale in of_one):
        yield scales
    yield Lines(f"{unit_of(runs)} a second", of_steps("tokens_per_second"))


def _points(
    records: Sequence[Record],
    name: str,
    most: int,
    change: Callable[[float], float | None] = float,
) -> list[tuple[float, float | None]]:
    """A field of all records over their steps, changed where `change` is given."""
    values = [(step_of(record), number(record, name)) for record in records]
    return thinned([(x, None if y is None else change(y)) for x, y in values], most)


def _finite_perplexity(loss: float) -> float | None:
    found = perplexity(loss)
    return found if math.isfinite(found) else None


def _is_wide(chart: Lines) -> bool:
    """Whether values differ so much that only a logarithmic axis shows them all."""
    values = [y for of_one in chart.values for y in of_one if y > 0]
    return bool(values) and max(values) > 30 * min(values)


def unit_of(runs: Sequence[RunView]) -> Unit:
    """What rates count: tokens where a run has perplexities, or has not been evaluated yet."""
    evaluations = [record for run in runs for record in run.records.evaluations]
    has_tokens = any(number(record, "perplexity") is not None for record in evaluations)
    return "tokens" if has_tokens or not evaluations else "samples"


def metrics_of(evaluated: Record) -> dict[str, float]:
    """The metrics of the model in an evaluation."""
    return {
        name: value
        for name, value in evaluated.items()
        if name not in ("step", "time", "eval_loss", "perplexity") and isinstance(value, float)
    }


def memory_charts(runs: Sequence[RunView]) -> Iterator[Lines]:
    """Model state and peak over the steps; where it was planned, the peak that the plan says."""
    colours, most = colours_of(runs), most_of(MOST_POINTS, runs)
    for name, title in (("model_state_bytes", "model state"), ("peak_memory_bytes", "peak")):
        known = [v for run in runs for r in run.records.steps if (v := number(r, name))]
        units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
        scale, unit = next(u for u in units if max(known, default=0.0) >= u[0] or u[0] == 1)
        curves = [
            Curve(
                run.name,
                _points(run.records.steps, name, most, (1 / scale).__mul__),
                colours[run.name],
            )
            for run in runs
        ]
        planned = []
        for run in runs if name == "peak_memory_bytes" else ():
            for record in run.records.plans[-1:]:
                peak = number(record, "predicted_peak_memory_bytes")
                ends = {step_of(r) for r in [*run.records.steps[:1], *run.records.steps[-1:]]}
                if peak is not None:
                    points = [(x, peak / scale) for x in sorted(ends)]
                    colour = colours[run.name]
                    planned.append(Curve(f"{run.name} planned", points, colour, is_dashed=True))
        dashed = "; dashed: planned" if planned else ""
        yield Lines(f"{title}, {unit}{dashed}", [*curves, *planned])


def phase_chart(run: RunView, most: int, before: str = "") -> Iterator[Areas]:
    """The phases of the steps, each stretch the mean of a few; nothing if none is known."""
    rows = [
        (step_of(record), [number(record, f"{phase}_seconds") for phase in PHASES])
        for record in run.records.steps
    ]
    known = [(step, parts) for step, parts in rows if None not in parts]
    if not known:
        return
    size = -(-len(known) // most)
    groups = [known[start : start + size] for start in range(0, len(known), size)]
    parts = {
        phase: [statistics.fmean(max(0.0, row[at] or 0.0) for _, row in g) for g in groups]
        for at, phase in enumerate(PHASES)
    }
    title = f"{before}seconds of a step by phase, mean over ranks"
    if size > 1:
        title += f" and {size} steps"
    edges = [group[0][0] - 0.5 for group in groups]
    yield Areas(title, [*edges, known[-1][0] + 0.5], parts, PHASE_COLOURS)


def timeline(run: RunView) -> Iterator[Timeline]:
    """The last traced step of a run, of its first replica; nothing if none was traced."""
    if not run.spans:
        return
    step = max(span.step for span in run.spans)
    of_step = [span for span in run.spans if span.step == step]
    begin, replica = min(s.begin for s in of_step), min(s.replica for s in of_step)
    spans = [
        replace(span, begin=span.begin - begin, end=span.end - begin)
        for span in of_step
        if span.replica == replica
    ]
    length = max(span.end for span in spans)
    if length > 0:
        yield Timeline(f"Step {step} of {run.name}, replica {replica}", spans, length)


def sparsity_chart(run: RunView, colour: str) -> Bars:
    """The removed share of each layer."""
    rows = []
    for layer in run.layers:
        removed = 1 - layer.kept / layer.numel if layer.numel else 0.0
        rows.append((layer.name, [removed], f"{100 * removed:.1f} %"))
    return Bars(f"{run.name}: removed share of each layer, {run.layers_from}", rows, [colour])


def run_picture(runs: Sequence[RunView]) -> list[Chart]:
    """The charts of a picture: curves of training, and the time of a step; of one run by phase."""
    charts: list[Chart] = [chart for chart in training_charts(runs) if not chart.is_flat]
    if len(runs) == 1:
        return [*charts, *phase_chart(runs[0], MOST_COLUMNS)]
    colours, most = colours_of(runs), most_of(MOST_POINTS, runs)
    times = [
        Curve(run.name, _points(run.records.steps, "step_seconds", most), colours[run.name])
        for run in runs
    ]
    return [*charts, Lines("seconds of a step", times, key=colours)]
