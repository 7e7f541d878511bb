"""Draws one run, or several over each other, as one HTML page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from axsparse.observe.line_chart import (
    Chart,
    Column,
    Curve,
    Point,
    column_chart,
    line_chart,
    share_bars,
    thinned,
)
from axsparse.observe.metrics import perplexity
from axsparse.observe.phases import PHASES
from axsparse.observe.run_records import Record, RunRecords, number, step_of
from axsparse.observe.timeline_picture import joined, timeline
from axsparse.observe.trace_file import Span
from axsparse.observe.web_page import (
    PHASE_COLOURS,
    SERIES_COLOURS,
    html_table,
    legend,
    page,
)
from axsparse.runtime.console import format_bytes, format_count

GENERATOR = "axsparse report"
MOST_RUNS = 24
MOST_POINTS = 200
"""Of a curve; with several runs fewer, so that the page stays below 1 MB."""
MOST_COLUMNS = 80
"""Of a chart of phases; with several runs fewer."""
MOST_SPANS = 1_600
"""Of all timelines of the page."""
MOST_ROWS = 40
"""Of a table of what happened in a run."""


@dataclass(frozen=True)
class LayerShare:
    """How much of a layer is kept."""

    name: str
    kept: int
    numel: int


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run."""

    step: int
    nbytes: int | None
    """Of all files; None if its manifest cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """All that the page tells of one run; whatever a run has not is empty."""

    name: str
    records: RunRecords
    config_text: str = ""
    settings: Mapping[str, str]
    """Values by dotted key."""
    versions: Mapping[str, str]
    trace: str = ""
    """The name of the file that `spans` are from."""
    spans: Sequence[Span] = ()
    layers: Sequence[LayerShare] = ()
    layers_from: str = ""
    """The checkpoint or ticket that `layers` are from."""
    checkpoints: Sequence[SavedStep] = ()
    plan: Sequence[str] = ()
    """HTML of the planned memory."""
    notes: Sequence[str] = ()


def report_page(runs: Sequence[RunView]) -> str:
    """The text of the page. The names of runs differ."""
    return page(", ".join(run.name for run in runs), _lines(runs), GENERATOR)


def _lines(runs: Sequence[RunView]) -> Iterator[str]:
    several = len(runs) > 1
    colours = dict(zip((run.name for run in runs), _colours(len(runs)), strict=True))
    yield from _summary(runs)
    for run in runs:
        for note in run.notes:
            yield f'<p class="note">{escape(f"{run.name}: {note}" if several else note)}</p>'
    if several:
        yield "<h2>Where they differ</h2>"
        yield from _differences(runs)
    yield "<h2>Training</h2>"
    if several:
        yield legend(colours)
    yield '<div class="charts">'
    yield from _curves(runs, colours)
    yield "</div>"
    longest = max(len(run.records.steps) for run in runs)
    if longest > _most(MOST_POINTS, runs):
        yield (
            '<p class="note">Of each stretch of steps the lowest and the highest value are '
            "drawn; metrics.jsonl has all.</p>"
        )
    yield "<h2>Time of a step</h2>"
    yield '<div class="charts">'
    for run in runs:
        yield from _phases(run, _most(MOST_COLUMNS, runs), several=several)
    yield "</div>"
    yield from _timelines(runs)
    yield "<h2>Memory of a rank</h2>"
    yield '<div class="charts">'
    yield from _memory(runs, colours)
    yield "</div>"
    for run in runs:
        yield from run.plan
    yield from _masks(runs)
    yield from _sparsity(runs)
    for run in runs:
        yield from _rest(run, several=several)


def _colours(count: int) -> list[str]:
    return [SERIES_COLOURS[number % len(SERIES_COLOURS)] for number in range(count)]


def _most(of_one: int, runs: Sequence[RunView]) -> int:
    """How much is drawn of each run, if so much is drawn of one that is alone."""
    return max(16, of_one * 3 // (2 + len(runs)))


# -- tables -------------------------------------------------------------------------------


def _summary(runs: Sequence[RunView]) -> Iterator[str]:
    """A row for each run, with columns for what at least one of them has."""
    rows = [_figures(run) for run in runs]
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    yield from html_table(heads, ([row[head] or "–" for head in heads] for row in rows))


def _figures(run: RunView) -> dict[str, str]:
    """The columns of the summary; a text is empty where the run has no such figure."""
    records = run.records
    last = records.steps[-1] if records.steps else {}
    evaluated = records.evaluations[-1] if records.evaluations else {}
    seconds = [s for r in records.steps if (s := number(r, "step_seconds")) is not None]
    rates = [s for r in records.steps if (s := number(r, "tokens_per_second")) is not None]
    done = f"{step_of(last):,.0f}"
    wanted = run.settings.get("train.steps", "")
    if wanted.isdecimal():
        done += f" of {int(wanted):,}"
    return {
        "run": run.name,
        "steps": done,
        "loss": _shown(number(last, "loss"), "{:.4f}".format),
        "validation loss": _shown(number(evaluated, "eval_loss"), "{:.4f}".format),
        "perplexity": _shown(number(evaluated, "perplexity"), "{:.3f}".format),
        **{name: f"{100 * value:.2f} %" for name, value in _metrics(evaluated).items()},
        "median step": f"{statistics.median(seconds):.3g} s" if seconds else "",
        "tokens/s": format_count(statistics.median(rates)) if rates else "",
        "model state of a rank": _shown(number(last, "model_state_bytes"), format_bytes),
        "peak of a rank": _shown(number(last, "peak_memory_bytes"), format_bytes),
        "skipped": _shown(number(last, "skipped_steps") or None, "{:,.0f}".format),
        "went back": str(len(records.backs) or ""),
    }


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _metrics(evaluated: Record) -> dict[str, float]:
    """The metrics of the model in an evaluation."""
    return {
        name: value
        for name, value in evaluated.items()
        if name not in ("step", "time", "eval_loss", "perplexity") and isinstance(value, float)
    }


def _differences(runs: Sequence[RunView]) -> Iterator[str]:
    """The settings and versions in which not all runs are alike."""
    told = [
        {**run.settings, **{f"version of {k}": v for k, v in run.versions.items()}} for run in runs
    ]
    keys = dict.fromkeys(key for one in told for key in one if key != "run_dir")
    rows = [
        [key, *(one.get(key, "–") for one in told)]
        for key in keys
        if len({one.get(key) for one in told}) > 1
    ]
    if rows:
        yield from html_table(["setting", *(run.name for run in runs)], rows)
    else:
        yield "<p>In no setting and no version.</p>"


# -- curves -------------------------------------------------------------------------------


def _curves(runs: Sequence[RunView], colours: Mapping[str, str]) -> Iterator[str]:
    most = _most(MOST_POINTS, runs)
    has_tokens = any(
        number(r, "perplexity") is not None for run in runs for r in run.records.evaluations
    )
    crosses = [
        (step_of(record), _skipped(run, record))
        for run in runs
        for record in run.records.steps
        if record.get("skipped")
    ]
    crosses = crosses[:: max(1, len(crosses) // most)]

    def of_steps(name: str, change: Callable[[float], float | None] = float) -> list[Curve]:
        return [
            _curve(run, run.records.steps, name, colours[run.name], most, change) for run in runs
        ]

    def of_evaluations(name: str) -> list[Curve]:
        return [
            replace(
                _curve(run, run.records.evaluations, name, colours[run.name], most),
                name=f"{run.name} validation",
                is_dashed=True,
                is_marked=True,
            )
            for run in runs
        ]

    loss = Chart("loss; dashed: validation", crosses=crosses, shown="{:.5g}".format)
    if has_tokens:
        loss = replace(loss, title="loss, nats a token; dashed: validation")
    yield from line_chart([*of_steps("loss"), *of_evaluations("eval_loss")], loss)
    if has_tokens:
        curves = [*of_steps("loss", _finite_perplexity), *of_evaluations("perplexity")]
        yield from line_chart(curves, Chart("perplexity; dashed: validation", logarithmic=True))
    for name in dict.fromkeys(
        n for run in runs for r in run.records.evaluations for n in _metrics(r)
    ):
        yield from line_chart(of_evaluations(name), Chart(f"{name}, share of targets; validation"))
    yield from line_chart(of_steps("learning_rate"), Chart("learning rate"))
    norms = of_steps("grad_norm")
    chart = Chart("norm of the gradient", logarithmic=_is_wide(norms), crosses=crosses)
    yield from line_chart(norms, chart)
    scales = of_steps("loss_scale")
    if any(y != 1 for curve in scales for _, y in curve.points):
        yield from line_chart(scales, Chart("loss scale", logarithmic=True))
    unit = "tokens" if has_tokens or not any(run.records.evaluations for run in runs) else "samples"
    yield from line_chart(of_steps("tokens_per_second"), Chart(f"{unit} a second"))


# Reason: a curve is these six things, and only this function knows them all.
def _curve(
    run: RunView,
    records: Sequence[Record],
    name: str,
    colour: str,
    most: int,
    change: Callable[[float], float | None] = float,
) -> Curve:
    """A field of all records over their steps, changed where `change` is given."""
    points: list[Point] = []
    for record in records:
        value = number(record, name)
        points.append((step_of(record), None if value is None else change(value)))
    return Curve(run.name, thinned(points, most), colour)


def _finite_perplexity(loss: float) -> float | None:
    found = perplexity(loss)
    return found if math.isfinite(found) else None


def _is_wide(curves: Sequence[Curve]) -> bool:
    """Whether values differ so much that only a logarithmic axis shows them all."""
    values = [y for curve in curves for _, y in curve.points if y is not None and y > 0]
    return bool(values) and max(values) > 30 * min(values)


def _skipped(run: RunView, record: Record) -> str:
    reason = record.get("skip_reason") or "no reason told"
    return f"{run.name}, step {step_of(record):g} was skipped: {reason}"


def _memory(runs: Sequence[RunView], colours: Mapping[str, str]) -> Iterator[str]:
    """Model state and peak over the steps; where it was planned, the peak that the plan says."""
    most = _most(MOST_POINTS, runs)
    for name, title in (("model_state_bytes", "model state"), ("peak_memory_bytes", "peak")):
        beside = ""
        curves = [_curve(run, run.records.steps, name, colours[run.name], most) for run in runs]
        if name == "peak_memory_bytes":
            planned = [curve for run in runs for curve in _planned(run, colours[run.name])]
            curves += planned
            beside = "; dashed: planned" if planned else ""
        largest = max((y for c in curves for _, y in c.points if y is not None), default=0.0)
        unit, name_of_unit = next(
            (u, n)
            for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
            if largest >= u or u == 1
        )
        scaled = [
            replace(c, points=[(x, None if y is None else y / unit) for x, y in c.points])
            for c in curves
        ]
        shown = f"{{:.4g}} {name_of_unit}".format
        yield from line_chart(scaled, Chart(f"{title}, {name_of_unit}{beside}", shown=shown))


def _planned(run: RunView, colour: str) -> Iterator[Curve]:
    steps = run.records.steps
    for record in run.records.plans[-1:]:
        planned = number(record, "predicted_peak_memory_bytes")
        if steps and planned is not None:
            ends = sorted({step_of(steps[0]), step_of(steps[-1])})
            yield Curve(f"{run.name} planned", [(x, planned) for x in ends], colour, is_dashed=True)


# -- time ---------------------------------------------------------------------------------


def _phases(run: RunView, most: int, *, several: bool) -> Iterator[str]:
    """Columns of the phases, each the mean of a few steps."""
    rows = [
        (step_of(record), {p: number(record, f"{p}_seconds") for p in PHASES})
        for record in run.records.steps
    ]
    known = [(step, parts) for step, parts in rows if all(v is not None for v in parts.values())]
    size = -(-len(known) // most) if known else 1
    columns = []
    for start in range(0, len(known), size):
        group = known[start : start + size]
        means = {
            p: statistics.fmean(max(0.0, parts[p] or 0.0) for _, parts in group) for p in PHASES
        }
        columns.append(Column(group[0][0], group[-1][0], means))
    title = "seconds of a step by phase, mean over ranks"
    if size > 1:
        title += f" and {size} steps"
    named = f"{run.name}: {title}" if several else title
    yield from column_chart(columns, PHASE_COLOURS, Chart(named, shown="{:.3g} s".format))


def _timelines(runs: Sequence[RunView]) -> Iterator[str]:
    """The last traced step of each run, of its first replica."""
    traced = [run for run in runs if run.spans]
    for run in traced:
        step = max(span.step for span in run.spans)
        whole = [span for span in run.spans if span.step == step]
        begin, replica = min(s.begin for s in whole), min(s.replica for s in whole)
        own = [
            replace(span, begin=span.begin - begin, end=span.end - begin)
            for span in whole
            if span.replica == replica
        ]
        length = max(span.end for span in own)
        if length <= 0:
            continue
        drawn = joined(own, MOST_SPANS // len(traced))
        yield f"<h3>Step {step} of {escape(run.name)}, replica {replica}</h3>"
        yield from timeline(drawn, length)
        note = f"{run.trace} has every moment; ui.perfetto.dev opens it."
        if len(drawn) < len(own):
            note = f"{len(own):,} moments are drawn as {len(drawn):,}. {note}"
        yield f'<p class="note">{escape(note)}</p>'


# -- masks --------------------------------------------------------------------------------


def _masks(runs: Sequence[RunView]) -> Iterator[str]:
    """Changes of the masks, with the model state before and after each."""
    rows = []
    for run in runs:
        changes = run.records.masks
        for record in changes[:: -(-len(changes) // MOST_ROWS) or 1]:
            before, after = (number(record, f"model_state_bytes{when}") for when in ("_before", ""))
            sparsity = number(record, "sparsity")
            rows.append(
                [
                    run.name,
                    f"{step_of(record):g}",
                    str(record.get("masks") or ""),
                    "–" if sparsity is None else f"{100 * sparsity:.2f} %",
                    _shown(before, format_bytes) or "–",
                    _shown(after, format_bytes) or "–",
                ]
            )
    if rows:
        yield "<h2>Masks</h2>"
        heads = ["run", "after step", "what happened", "sparsity", "state before", "state after"]
        yield from html_table(heads, rows)


def _sparsity(runs: Sequence[RunView]) -> Iterator[str]:
    known = [run for run in runs if any(layer.numel for layer in run.layers)]
    if not known:
        return
    yield '<h2>Sparsity by layer</h2><div class="charts">'
    for number_of_run, run in enumerate(known):
        rows = []
        for layer in run.layers:
            removed = 1 - layer.kept / layer.numel if layer.numel else 0.0
            told = f"{layer.name}: {layer.kept:,} of {layer.numel:,} parameters are kept"
            rows.append((layer.name, removed, told))
        title = f"{run.name}: removed share of each layer, {run.layers_from}"
        yield from share_bars(rows, title, SERIES_COLOURS[number_of_run % len(SERIES_COLOURS)])
    yield "</div>"


# -- the rest -----------------------------------------------------------------------------


def _rest(run: RunView, *, several: bool) -> Iterator[str]:
    """Checkpoints, versions and configuration of a run."""
    of_run = f" of {escape(run.name)}" if several else ""
    if run.checkpoints:
        yield f"<h2>Checkpoints{of_run}</h2>"
        rows = [
            [
                f"step {saved.step:,}",
                "unreadable" if saved.nbytes is None else format_bytes(saved.nbytes),
            ]
            for saved in run.checkpoints[:MOST_ROWS]
        ]
        yield from html_table(["checkpoint", "size"], rows)
    if run.versions:
        yield f"<h2>Versions{of_run}</h2>"
        yield from html_table(["package", "version"], run.versions.items())
    if run.config_text:
        yield f"<h2>Configuration{of_run}</h2>"
        text = escape(run.config_text)
        yield f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
