"""`axsparse report`: draws one run, or several over each other, as one HTML page."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.cli.parser import CommandParser, say
from axsparse.runtime.errors import AxsparseError, ConfigError, MissingInputError, reading, writing

if TYPE_CHECKING:
    from axsparse.observe.charts import Bars
    from axsparse.observe.run_report import RunView
    from axsparse.observe.trace_file import Span

DESCRIPTION = """\
Write a page with the curves of a run, its phases, memory, sparsity and settings. Several runs are
laid over each other, with a table of the settings in which they differ:

  axsparse report runs/my_run
  axsparse report runs/dense runs/pruned --out comparison.html

The page is one file that loads nothing from elsewhere. The run may still go on. Charts are drawn by
matplotlib: pip install 'axsparse[plot]'.
"""
REPORT_FILE = "report.html"


def parser() -> CommandParser:
    arguments = CommandParser(_report, prog="axsparse report", description=DESCRIPTION)
    add = arguments.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="the directory of a run")
    text = f"the page, an .html file (default: {REPORT_FILE} in the first RUN)"
    add("--out", metavar="PATH", type=Path, help=text)
    return arguments


def _report(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.observe.charts import PAGE_MARK, check_installed
    from axsparse.observe.run_report import MOST_RUNS, report_page
    from axsparse.runtime.files.atomic import new_path, write_new
    from axsparse.runtime.files.paths import reject_foreign

    runs: list[Path] = arguments.runs
    if len(set(map(os.path.realpath, runs))) < len(runs):
        raise ConfigError("report: a RUN is given twice; name each once")
    if len(runs) > MOST_RUNS:
        raise ConfigError(
            f"report: {len(runs)} runs are too many for one page; name {MOST_RUNS} at most"
        )
    path: Path = arguments.out or runs[0] / REPORT_FILE
    if path.suffix != ".html":
        raise ConfigError(f"--out: {str(path)!r} does not end in .html; add that")
    check_installed("report")
    views = [view_run(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    content = report_page(views).encode()
    advice = "free the disk, or choose another place"
    with writing(f"--out: {path}", advice):
        reject_foreign("--out:", path, PAGE_MARK)
        with new_path(path) as unfinished:
            write_new(unfinished, content)
    say(f"{path}: {len(content) / 1e3:.0f} kB; open it in a browser")


def _names(runs: Sequence[Path]) -> list[str]:
    """A short name for each run; runs whose folders have equal names get their full paths."""
    full = [os.path.realpath(run) for run in runs]
    short = [Path(path).name or path for path in full]
    return [
        name if short.count(name) == 1 else path for path, name in zip(full, short, strict=True)
    ]


def view_run(run: Path, name: str) -> RunView:
    """The data of a run for the page.

    Raises MissingInputError if it is no run or has no record yet, DataError if a record is damaged.
    Other files that cannot be read, maybe because the run writes them just now, become a note.
    """
    from axsparse.observe.run_report import RunView, read_records
    from axsparse.observe.trace_file import TRACES
    from axsparse.runtime.files.run_folder import CONFIG_FILE, METRICS_FILE
    from axsparse.training.run_directory import config_text, settings_in

    with reading(f"report: {run}", "name a run that you may read"):
        has_records = (run / METRICS_FILE).is_file()
    if not has_records:
        raise MissingInputError(
            f"report: {run} has no {METRICS_FILE}; name the directory of a run, such as runs/my_run"
        )
    records = read_records(run / METRICS_FILE)
    notes = []
    if records.is_cut:
        notes.append("the last line of metrics.jsonl is cut off, and is left out")
    text = config_text(run)
    if not text:
        notes.append(f"{CONFIG_FILE} is not there, or cannot be read")
    trace, spans = _trace(run / TRACES, notes)
    return RunView(
        name=name,
        records=records,
        config_text=text,
        settings=settings_in(text),
        # They stand in the comments at the beginning.
        versions=dict(re.findall(r"^# (\S+) (.*)$", text, re.MULTILINE)),
        trace=trace,
        spans=spans,
        sparsity=_sparsity(run, name, notes),
        notes=notes,
    )


def _trace(folder: Path, notes: list[str]) -> tuple[str, list[Span]]:
    """The trace of the latest steps that can be read, by its name below the run; no spans if there
    is none."""
    from axsparse.observe.trace_file import last_step, read

    for path in sorted(folder.glob("*.json"), key=last_step, reverse=True):
        with _collecting(notes):
            if spans := read(path):
                return f"{folder.name}/{path.name}", spans
    return "", []


@contextlib.contextmanager
def _collecting(notes: list[str]) -> Iterator[None]:
    try:
        yield
    except AxsparseError as error:
        notes.append(str(error))


def _sparsity(run: Path, name: str, notes: list[str]) -> Bars | None:
    from axsparse.observe.charts import SERIES_COLOURS, Bars
    from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, path_of
    from axsparse.training.checkpoint.verification import open_checkpoint, steps_in

    steps: list[int] = []
    with _collecting(notes), reading(f"{run / CHECKPOINTS}", "its layers are left out"):
        steps = steps_in(run)
    for step in steps:
        with _collecting(notes):
            layers = open_checkpoint(path_of(run / CHECKPOINTS, step)).manifest.layers
            rows = []
            for layer, contents in layers.items():
                entries = contents.parameters.values()
                numel = sum(math.prod(entry.shape) for entry in entries)
                removed = 1 - sum(e.kept for e in entries) / numel if numel else 0.0
                rows.append((layer, [removed], f"{100 * removed:.1f} %"))
            title = f"{name}: removed share of each layer, after step {step}"
            return Bars(title, rows, SERIES_COLOURS[:1])
    return None
