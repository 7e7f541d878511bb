"""Draws one run, or several over each other, as one HTML page.

Reads metrics.jsonl, also of a run that still runs or was killed; docs/reference/metrics.md says
what the fields mean.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path

from axsparse.observe.charts import (
    PHASE_COLOURS,
    SERIES_COLOURS,
    Areas,
    Bars,
    Chart,
    Curve,
    Lines,
    Timeline,
    chart_html,
    html_table,
    legend,
    page,
    thinned,
)
from axsparse.observe.metrics import perplexity
from axsparse.observe.phases import PHASES
from axsparse.observe.trace_file import Span
from axsparse.runtime.console import Unit, format_bytes, format_count
from axsparse.runtime.errors import DataError, MissingInputError, reading

Value = float | str | None
Record = Mapping[str, Value]
"""One line; truth values are 0 and 1, and None stands for values that are no text and no finite
number."""


@dataclass(frozen=True)
class RunRecords:
    """The records of a run by their kind, each kind in order of steps."""

    steps: Sequence[Record]
    evaluations: Sequence[Record]
    masks: Sequence[Record]
    plans: Sequence[Record]
    is_cut: bool
    """Whether the last line was only half there, and is left out."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The data of a report on one run; missing data is empty."""

    name: str
    records: RunRecords
    config_text: str = ""
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    trace: str = ""
    """The name of the file that `spans` are from."""
    spans: Sequence[Span] = ()
    sparsity: Bars | None = None
    notes: Sequence[str] = ()


def number(record: Record, name: str) -> float | None:
    """A number of a record; None if it has none of this name."""
    value = record.get(name)
    return None if isinstance(value, str) else value


def step_of(record: Record) -> float:
    """The steps that were done when a record was written; the record of a step counts that step."""
    return number(record, "step") or 0.0


def read_records(path: Path) -> RunRecords:
    """The records of a metrics.jsonl. Raises MissingInputError if it cannot be read or has no
    record yet, DataError if a line other than the last is no record."""
    with reading(f"{path}:", "name the directory of a run"):
        lines = path.read_bytes().split(b"\n")
    kinds: dict[str, list[Record]] = {kind: [] for kind in _KEYS}
    is_cut = False
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record(line)
        except ValueError as wrong:
            if at == len(lines):  # No line break follows it: it was not written to its end.
                is_cut = True
                break
            raise DataError(
                f"{path}:{at}: is no record of a run ({wrong}); restore the file, or remove the "
                "line"
            ) from None
        for kind, key in _KEYS.items():
            if key in record:
                kinds[kind].append(record)
                break
    if not any(kinds.values()):
        raise MissingInputError(
            f"{path}: has no record yet; wait for the first step, or name another run"
        )
    return RunRecords(
        **{kind: sorted(of_kind, key=step_of) for kind, of_kind in kinds.items()}, is_cut=is_cut
    )


_KEYS = {
    "steps": "loss",
    "evaluations": "eval_loss",
    "masks": "masks",
    "plans": "predicted_peak_memory_bytes",
}
"""A key that only this kind of record has."""


def _record(line: bytes) -> Record:
    """The record of a line; ValueError if it is none."""
    try:
        fields = json.loads(line, parse_int=float, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(fields, dict):
        raise ValueError("no object")
    record = {name: _value(value) for name, value in fields.items()}
    if not isinstance(record.get("step"), float):
        raise ValueError("without a step")
    return record


def _value(value: object) -> Value:
    if isinstance(value, bool | float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, str) else None


MOST_RUNS = len(SERIES_COLOURS)
MOST_ROWS = 40
MOST_POINTS = 200
"""The most points of a curve; with several runs fewer, so that the page stays below 1 MB."""
MOST_COLUMNS = 80
"""Stretches of steps in a chart of phases; with several runs fewer."""


def report_page(runs: Sequence[RunView]) -> str:
    return page(", ".join(run.name for run in runs), _lines(runs))


def _lines(runs: Sequence[RunView]) -> Iterator[str]:
    several = len(runs) > 1
    yield from _summary(runs)
    for run in runs:
        for note in run.notes:
            yield f'<p class="note">{escape(f"{run.name}: {note}" if several else note)}</p>'
    if several:
        yield "<h2>Where they differ</h2>"
        yield from _differences(runs)
    yield "<h2>Training</h2>"
    if several:
        yield legend(dict(zip((run.name for run in runs), SERIES_COLOURS, strict=False)))
    yield from _grid(training_charts(runs))
    longest = max(len(run.records.steps) for run in runs)
    if longest > _most(MOST_POINTS, runs):
        yield (
            '<p class="note">Of each stretch of steps the lowest and the highest value are '
            "drawn; metrics.jsonl has all.</p>"
        )
    yield from _skipped(runs)
    yield "<h2>Time of a step</h2>"
    most = _most(MOST_COLUMNS, runs)
    phases = (phase_chart(run, most, f"{run.name}: " if several else "") for run in runs)
    yield from _grid(chart for of_run in phases for chart in of_run)
    for run in runs:
        for chart in _timeline(run):
            yield from chart_html(chart)
            words = f"{run.trace} has every moment; ui.perfetto.dev opens it."
            yield f'<p class="note">{escape(words)}</p>'
    yield "<h2>Memory of a rank</h2>"
    yield from _grid(memory_charts(runs))
    yield from _masks(runs)
    pairs = zip(runs, SERIES_COLOURS, strict=False)
    sparse = [replace(run.sparsity, colours=[c]) for run, c in pairs if run.sparsity is not None]
    if sparse:
        yield "<h2>Sparsity by layer</h2>"
        yield from _grid(sparse)
    for run in runs:
        yield from _rest(run, f" of {escape(run.name)}" if several else "")


def _grid(charts: Iterable[Chart]) -> Iterator[str]:
    """Charts next to each other, as many as fit, and below them sentences for the charts without a
    change."""
    yield '<div class="charts">'
    for chart in sorted(charts, key=lambda chart: isinstance(chart, Lines) and chart.is_flat):
        yield from chart_html(chart)
    yield "</div>"


def _most(of_one: int, runs: Sequence[RunView]) -> int:
    """How many points or stretches are drawn of each run, if `of_one` are drawn of a run that is
    alone."""
    return max(16, 2 * of_one // (1 + len(runs)))


# -- charts -------------------------------------------------------------------------------


def _curves(
    runs: Sequence[RunView],
    name: str,
    change: Callable[[float], float | None] = float,
    *,
    validation: bool = False,
) -> list[Curve]:
    """A curve of each run, over its steps or its evaluations."""
    curves = []
    for run, colour in zip(runs, SERIES_COLOURS, strict=False):
        records = run.records.evaluations if validation else run.records.steps
        values = [(step_of(record), number(record, name)) for record in records]
        points = thinned(
            [(x, None if y is None else change(y)) for x, y in values], _most(MOST_POINTS, runs)
        )
        title = f"{run.name} validation" if validation else run.name
        curves.append(Curve(title, points, colour, is_dashed=validation, is_marked=validation))
    return curves


def training_charts(runs: Sequence[RunView]) -> Iterator[Lines]:
    """Loss, perplexity, metrics, learning rate, norm of the gradient, loss scale and rate."""
    steps, evaluations = partial(_curves, runs), partial(_curves, runs, validation=True)
    skipped = {step_of(r) for run in runs for r in run.records.steps if r.get("skipped")}
    crosses = sorted(skipped)[:: max(1, len(skipped) // _most(MOST_POINTS, runs))]
    records = [record for run in runs for record in run.records.evaluations]
    has_tokens = any(number(record, "perplexity") is not None for record in records)
    nats = ", nats a token" if has_tokens else ""
    losses = [*steps("loss"), *evaluations("eval_loss")]
    yield Lines(f"loss{nats}; dashed: validation", losses, crosses=crosses)
    rises = [
        Curve(
            run.name,
            [
                (step_of(record), number(record, f"loss_{when}"))
                for record in run.records.masks
                if "loss_after" in record
                for when in ("before", "after")
            ],
            colour,
            is_marked=True,
        )
        for run, colour in zip(runs, SERIES_COLOURS, strict=False)
    ]
    if any(rise.points for rise in rises):
        yield Lines("validation loss before and after each pruning, and recovered between", rises)
    if has_tokens:
        curves = [*steps("loss", _finite_perplexity), *evaluations("perplexity")]
        yield Lines("perplexity; dashed: validation", curves, logarithmic=True)
    for name in dict.fromkeys(name for record in records for name in _metrics_of(record)):
        yield Lines(f"{name}, share of targets; validation", evaluations(name))
    yield Lines("learning rate", steps("learning_rate"))
    norms = Lines("norm of the gradient", steps("grad_norm"), crosses=crosses)
    sizes = [y for of_one in norms.values for y in of_one if y > 0]
    # Only a logarithmic axis shows values that differ so much.
    yield replace(norms, logarithmic=bool(sizes) and max(sizes) > 30 * min(sizes))
    scales = Lines("loss scale", steps("loss_scale"), logarithmic=True)
    if any(scale != 1 for of_one in scales.values for scale in of_one):
        yield scales
    yield Lines(f"{_unit(runs)} a second", steps("tokens_per_second"))


def _finite_perplexity(loss: float) -> float | None:
    value = perplexity(loss)
    return value if math.isfinite(value) else None


def _unit(runs: Sequence[RunView]) -> Unit:
    """The unit of rates: tokens where a run has perplexities, or has not been evaluated yet."""
    evaluations = [record for run in runs for record in run.records.evaluations]
    has_tokens = any(number(record, "perplexity") is not None for record in evaluations)
    return "tokens" if has_tokens or not evaluations else "samples"


def _metrics_of(evaluated: Record) -> dict[str, float]:
    return {
        name: value
        for name, value in evaluated.items()
        if name not in ("step", "time", "eval_loss", "perplexity") and isinstance(value, float)
    }


def memory_charts(runs: Sequence[RunView]) -> Iterator[Lines]:
    """Model state and peak over the steps; where it was planned, the peak that the plan says."""
    for name, title in (("model_state_bytes", "model state"), ("peak_memory_bytes", "peak")):
        known = [v for run in runs for r in run.records.steps if (v := number(r, name))]
        units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
        scale, unit = next(u for u in units if max(known, default=0.0) >= u[0] or u[0] == 1)
        curves = _curves(runs, name, (1 / scale).__mul__)
        planned = []
        for run, colour in zip(runs, SERIES_COLOURS, strict=False):
            record = run.records.plans[-1] if run.records.plans else {}
            peak = number(record, "predicted_peak_memory_bytes")
            if peak is not None and name == "peak_memory_bytes":
                ends = {step_of(r) for r in [*run.records.steps[:1], *run.records.steps[-1:]]}
                points = [(x, peak / scale) for x in sorted(ends)]
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


def _timeline(run: RunView) -> Iterator[Timeline]:
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


# -- tables -------------------------------------------------------------------------------


def _summary(runs: Sequence[RunView]) -> Iterator[str]:
    """A row for each run, with the columns that at least one of them has."""
    unit = _unit(runs)
    rows = [_figures(run, unit) for run in runs]
    # Runs of other models have other metrics; the row of most columns has them in their place.
    every = dict.fromkeys(head for row in sorted(rows, key=len, reverse=True) for head in row)
    heads = [head for head in every if any(row.get(head) for row in rows)]
    yield from html_table(heads, ([row.get(head) or "–" for head in heads] for row in rows))


def _figures(run: RunView, unit: Unit) -> dict[str, str]:
    """The columns of the summary; a text is empty where the run has no such figure."""
    records = run.records
    last = records.steps[-1] if records.steps else {}
    evaluated = records.evaluations[-1] if records.evaluations else {}
    seconds = [s for r in records.steps if (s := number(r, "step_seconds")) is not None]
    rates = [s for r in records.steps if (s := number(r, "tokens_per_second")) is not None]
    done = f"{step_of(last):,.0f}"
    steps = run.settings.get("train.steps", "")
    if steps.isdecimal():
        done += f" of {int(steps):,}"
    return {
        "run": run.name,
        "steps": done,
        "loss": _shown(last, "loss", "{:.4f}".format),
        "validation loss": _shown(evaluated, "eval_loss", "{:.4f}".format),
        "perplexity": _shown(evaluated, "perplexity", "{:.3f}".format),
        **{name: f"{100 * value:.2f} %" for name, value in _metrics_of(evaluated).items()},
        "median step": f"{statistics.median(seconds):.3g} s" if seconds else "",
        f"{unit}/s": format_count(statistics.median(rates)) if rates else "",
        "model state of a rank": _shown(last, "model_state_bytes", format_bytes),
        "peak of a rank": _shown(last, "peak_memory_bytes", format_bytes),
        "skipped": _shown(last, "skipped_steps", lambda n: f"{n:,.0f}" if n else ""),
    }


def _shown(record: Record, name: str, form: Callable[[float], str]) -> str:
    value = number(record, name)
    return "" if value is None else form(value)


def _differences(runs: Sequence[RunView]) -> Iterator[str]:
    columns = [
        {**run.settings, **{f"version of {k}": v for k, v in run.versions.items()}} for run in runs
    ]
    keys = dict.fromkeys(key for column in columns for key in column if key != "run_dir")
    rows = [
        [key, *(column.get(key, "–") for column in columns)]
        for key in keys
        if len({column.get(key) for column in columns}) > 1
    ]
    if rows:
        yield from html_table(["setting", *(run.name for run in runs)], rows)
    else:
        yield "<p>In no setting and no version.</p>"


def _skipped(runs: Sequence[RunView]) -> Iterator[str]:
    """The skipped steps, which are crosses in the charts, with their reasons."""
    rows = [
        [run.name, f"{step_of(record):g}", str(record.get("skip_reason") or "no reason told")]
        for run in runs
        for record in run.records.steps
        if record.get("skipped")
    ]
    if rows:
        yield from html_table(["run", "skipped step", "why"], rows[-MOST_ROWS:])


def _masks(runs: Sequence[RunView]) -> Iterator[str]:
    """Changes of the masks, with the model state before and after each."""
    rows = [
        {
            "run": run.name,
            "after step": f"{step_of(record):g}",
            "what happened": str(record.get("masks") or ""),
            "sparsity": _shown(record, "sparsity", lambda share: f"{100 * share:.2f} %") or "–",
            "loss": f"{number(record, 'loss_before'):.4f} → {number(record, 'loss_after'):.4f}"
            if number(record, "loss_after") is not None
            else "–",
            "state before": _shown(record, "model_state_bytes_before", format_bytes) or "–",
            "state after": _shown(record, "model_state_bytes", format_bytes) or "–",
        }
        for run in runs
        for record in run.records.masks[:: -(-len(run.records.masks) // MOST_ROWS) or 1]
    ]
    if rows:
        yield "<h2>Masks</h2>"
        yield from html_table([*rows[0]], ([*row.values()] for row in rows))


def _rest(run: RunView, of_run: str) -> Iterator[str]:
    if run.versions:
        yield f"<h2>Versions{of_run}</h2>"
        yield from html_table(["package", "version"], run.versions.items())
    if run.config_text:
        yield f"<h2>Configuration{of_run}</h2>"
        text = escape(run.config_text)
        yield f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
