"""Draws one run, or several over each other, as one HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from axsparse.observe.charts import Chart, Lines, chart_html, picture
from axsparse.observe.run_charts import (
    MOST_COLUMNS,
    MOST_POINTS,
    colours_of,
    memory_charts,
    metrics_of,
    most_of,
    phase_chart,
    run_picture,
    sparsity_chart,
    timeline,
    training_charts,
    unit_of,
)
from axsparse.observe.run_records import RunView, number, step_of
from axsparse.observe.web_page import SERIES_COLOURS, html_table, legend, page
from axsparse.runtime.console import Unit, format_bytes, format_count

GENERATOR = "axsparse report"
MOST_RUNS = len(SERIES_COLOURS)
"""A page has no more colours."""
MOST_ROWS = 40
"""Of a table of what happened in a run."""


def report_page(runs: Sequence[RunView]) -> str:
    """The text of the page. The names of runs differ."""
    return page(", ".join(run.name for run in runs), _lines(runs), GENERATOR)


def report_picture(runs: Sequence[RunView]) -> bytes:
    """The curves as one PNG picture, for slides and papers."""
    return picture(run_picture(runs), GENERATOR)


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
        yield legend(colours_of(runs))
    yield from _grid(training_charts(runs))
    longest = max(len(run.records.steps) for run in runs)
    if longest > most_of(MOST_POINTS, runs):
        yield (
            '<p class="note">Of each stretch of steps the lowest and the highest value are '
            "drawn; metrics.jsonl has all.</p>"
        )
    yield from _skipped(runs)
    yield "<h2>Time of a step</h2>"
    most = most_of(MOST_COLUMNS, runs)
    phases = (phase_chart(run, most, f"{run.name}: " if several else "") for run in runs)
    yield from _grid(chart for of_run in phases for chart in of_run)
    for run in runs:
        for chart in timeline(run):
            yield from chart_html(chart)
            words = f"{run.trace} has every moment; ui.perfetto.dev opens it."
            yield f'<p class="note">{escape(words)}</p>'
    yield "<h2>Memory of a rank</h2>"
    yield from _grid(memory_charts(runs))
    for run in runs:
        if run.plan is not None:
            yield from chart_html(run.plan)
    yield from _masks(runs)
    sparse = [run for run in runs if any(layer.numel for layer in run.layers)]
    if sparse:
        yield "<h2>Sparsity by layer</h2>"
        yield from _grid(map(sparsity_chart, sparse, SERIES_COLOURS))
    for run in runs:
        yield from _rest(run, several=several)


def _grid(charts: Iterable[Chart]) -> Iterator[str]:
    """Charts beside each other, as many as there is room for, and below them what is flat."""
    yield '<div class="charts">'
    for chart in sorted(charts, key=lambda chart: isinstance(chart, Lines) and chart.is_flat):
        yield from chart_html(chart)
    yield "</div>"


# -- tables -------------------------------------------------------------------------------


def _summary(runs: Sequence[RunView]) -> Iterator[str]:
    """A row for each run, with columns for what at least one of them has."""
    unit = unit_of(runs)
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
    wanted = run.settings.get("train.steps", "")
    if wanted.isdecimal():
        done += f" of {int(wanted):,}"
    return {
        "run": run.name,
        "steps": done,
        "loss": _shown(number(last, "loss"), "{:.4f}".format),
        "validation loss": _shown(number(evaluated, "eval_loss"), "{:.4f}".format),
        "perplexity": _shown(number(evaluated, "perplexity"), "{:.3f}".format),
        **{name: f"{100 * value:.2f} %" for name, value in metrics_of(evaluated).items()},
        "median step": f"{statistics.median(seconds):.3g} s" if seconds else "",
        f"{unit}/s": format_count(statistics.median(rates)) if rates else "",
        "model state of a rank": _shown(number(last, "model_state_bytes"), format_bytes),
        "peak of a rank": _shown(number(last, "peak_memory_bytes"), format_bytes),
        "skipped": _shown(number(last, "skipped_steps") or None, "{:,.0f}".format),
    }


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


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
