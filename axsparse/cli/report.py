"""`axsparse report`: draws one run, or several over each other, as one HTML page."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.cli.parser import CommandParser, say
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    MissingInputError,
    OutputError,
    writing,
)

if TYPE_CHECKING:
    from axsparse.observe.charts import Bars
    from axsparse.observe.run_records import LayerShare, RunRecords, RunView
    from axsparse.observe.trace_file import Span
    from axsparse.training.checkpoint.manifest import CheckpointManifest

DESCRIPTION = """\
Write a page with the curves of a run, its phases, memory, sparsity and settings. Several runs are
laid over each other, with a table of the settings in which they differ:

  axsparse report runs/my_run
  axsparse report runs/dense runs/pruned --out comparison.html
  axsparse report runs/dense runs/pruned --png comparison.png

The page is one file that loads nothing from elsewhere. The run may still go on. Charts are drawn by
matplotlib: pip install 'axsparse[plot]'.
"""
EPILOG = """\
exit codes:
  0 done   65 a record is damaged   66 RUN is no run, or has no record yet
  74 PATH cannot be written   78 arguments that cannot be run
"""
REPORT_FILE = "report.html"
MOST_CONFIG_BYTES = 1_000_000


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        _report, prog="axsparse report", description=DESCRIPTION, epilog=EPILOG
    )
    arguments.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="the directory of a run"
    )
    arguments.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        help=f"the page, an .html file (default: {REPORT_FILE} in the first RUN)",
    )
    arguments.add_argument(
        "--png",
        metavar="PATH",
        type=Path,
        help="write a picture of the curves instead, a .png file",
    )
    return arguments


def _report(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.observe.charts import check_installed
    from axsparse.observe.run_report import MOST_RUNS, report_page, report_picture

    runs: list[Path] = arguments.runs
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("report: a RUN is given twice; name each once")
    if len(runs) > MOST_RUNS:
        raise ConfigError(
            f"report: {len(runs)} runs are too many for one page; name {MOST_RUNS} at most"
        )
    if arguments.out is not None and arguments.png is not None:
        raise ConfigError("report: --out names a page and --png a picture; give one of them")
    option, ending = ("--out", ".html") if arguments.png is None else ("--png", ".png")
    path: Path = arguments.png or arguments.out or runs[0] / REPORT_FILE
    if path.suffix != ending:
        raise ConfigError(f"{option}: {str(path)!r} does not end in {ending}; add that")
    check_installed("report")
    views = [view_run(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    content = report_page(views).encode() if arguments.png is None else report_picture(views)
    _write(path, content, option)
    advice = "; open it in a browser" if arguments.png is None else ""
    say(f"{path}: {len(content) / 1e3:.0f} kB{advice}")


def _names(runs: Sequence[Path]) -> list[str]:
    """A short name for each run; runs whose folders have equal names get their whole paths."""
    short = [run.resolve().name or str(run) for run in runs]
    times = Counter(short)
    return [
        name if times[name] == 1 else str(run.resolve())
        for run, name in zip(runs, short, strict=True)
    ]


def view_run(run: Path, name: str) -> RunView:
    """All that the page tells of a run.

    Raises MissingInputError if it is no run or has no record yet, DataError if a record is
    damaged. What else cannot be read, maybe because the run writes it just now, becomes a note.
    """
    from axsparse.observe.run_records import RunView, read_records
    from axsparse.observe.trace_file import TRACES
    from axsparse.training.run_directory import CONFIG_FILE, METRICS_FILE

    if not (run / METRICS_FILE).is_file():
        raise MissingInputError(
            f"report: {run} has no {METRICS_FILE}; name the directory of a run, such as runs/my_run"
        )
    records = read_records(run / METRICS_FILE)
    notes = []
    if records.is_cut:
        notes.append("the last line of metrics.jsonl is cut off, and is left out")
    text = _config_text(run / CONFIG_FILE)
    if not text:
        notes.append(f"{CONFIG_FILE} is not there, or cannot be read")
    trace, spans = _trace(run / TRACES, notes)
    checkpoints, newest = _saved(run, notes)
    layers, layers_from, plan = _of_checkpoint(newest, records, notes)
    return RunView(
        name=name,
        records=records,
        config_text=text,
        settings=_settings(text),
        versions=_versions(text),
        trace=trace,
        spans=spans,
        layers=layers,
        layers_from=layers_from,
        checkpoints=checkpoints,
        plan=plan,
        notes=notes,
    )


def _trace(folder: Path, notes: list[str]) -> tuple[str, list[Span]]:
    """The newest trace that can be read, by its name below the run; no spans if there is none."""
    from axsparse.observe.trace_file import read

    for path in sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime):
        with _noted(notes):
            if spans := read(path):
                return f"{folder.name}/{path.name}", spans
    return "", []


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Make a note of an error of the code within."""
    try:
        yield
    except AxsparseError as error:
        notes.append(str(error))


# -- config.yaml --------------------------------------------------------------------------


def _config_text(path: Path) -> str:
    """The text of a run's configuration; empty if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_CONFIG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _versions(text: str) -> dict[str, str]:
    """The versions in the comments at the beginning of config.yaml."""
    versions = {}
    for line in text.splitlines():
        mark, _, said = line.partition(" ")
        if mark != "#":
            break
        package, _, version = said.partition(" ")
        versions[package] = version
    return versions


def _settings(text: str) -> dict[str, str]:
    """The values in config.yaml by dotted key, as they stand there.

    Another version of axsparse may have written it: so keys are not compared with the schema's.
    """
    import yaml

    from axsparse.training.checkpoint.verification import flat

    try:
        # Every scalar stays the text that it is.
        found = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - it makes texts only
        settings = flat(found) if isinstance(found, Mapping) else {}
        return {str(key): _shown(value) for key, value in settings.items()}
    except (yaml.YAMLError, RecursionError):
        return {}


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


# -- checkpoints --------------------------------------------------------------------------


def _saved(
    run: Path, notes: list[str]
) -> tuple[list[tuple[int, int | None]], CheckpointManifest | None]:
    """The checkpoints, newest first, and the manifest of the newest that can be read.

    Only manifests are read. A checkpoint that a run removes meanwhile is no mistake.
    """
    from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, path_of
    from axsparse.training.checkpoint.verification import open_checkpoint, steps_in

    saved: list[tuple[int, int | None]] = []
    newest: CheckpointManifest | None = None
    for step in steps_in(run):
        manifest = None
        with _noted(notes):
            manifest = open_checkpoint(path_of(run / CHECKPOINTS, step)).manifest
        saved.append((step, None if manifest is None else manifest.nbytes))
        newest = newest or manifest
    return saved, newest


def _of_checkpoint(
    manifest: CheckpointManifest | None, records: RunRecords, notes: list[str]
) -> tuple[list[LayerShare], str, Bars | None]:
    """What is kept of each layer, the name of the checkpoint, and a chart of planned memory."""
    from axsparse.observe.run_records import LayerShare

    if manifest is None:
        return [], "", None
    layers = []
    for name, layer in manifest.layers.items():
        entries = layer.parameters.values()
        numel = sum(math.prod(entry.shape) for entry in entries)
        layers.append(LayerShare(name, sum(entry.kept for entry in entries), numel))
    return layers, f"after step {manifest.progress.step}", _planned(manifest, records, notes)


def _planned(manifest: CheckpointManifest, records: RunRecords, notes: list[str]) -> Bars | None:
    """A chart of the planned memory by category, beside what it would be dense.

    There is none if the run made no plan, or trained a model of the user's own.
    """
    from pydantic import ValidationError

    from axsparse.config.load import recorded_config
    from axsparse.observe.run_records import number
    from axsparse.planner.html_page import memory_bars
    from axsparse.planner.plan_model import planned_memory

    predicted = [p for r in records.plans if (p := number(r, "predicted_peak_memory_bytes"))]
    peaks = [p for r in records.steps if (p := number(r, "peak_memory_bytes"))]
    if not predicted or not peaks:
        return None
    shapes = {n: e.shape for layer in manifest.layers.values() for n, e in layer.parameters.items()}
    try:
        config = recorded_config(manifest.config)
        found = planned_memory(config, shapes, manifest.pruned, predicted[-1])
    except ValidationError:
        notes.append("the plan of its memory is not shown: another version wrote its settings")
        return None
    except AxsparseError as error:
        notes.append(f"the plan of its memory is not shown: {error}")
        return None
    if found is None:
        return None
    now, dense = found
    rows = [(f"stage {n}", memory) for n, memory in enumerate(now)]
    if now != dense:
        rows += [(f"stage {n} dense", memory) for n, memory in enumerate(dense)]
    return memory_bars("Planned memory of a rank of each stage", rows, peaks[-1], "measured peak")


# -- the file -----------------------------------------------------------------------------


def _write(path: Path, content: bytes, option: str) -> None:
    """Write what `option` names, which appears complete or not at all.

    Raises OutputError if it cannot be written, or if a file of somebody else is there.
    """
    from axsparse.observe.run_report import GENERATOR
    from axsparse.runtime.files.atomic import new_path, write_new

    with writing(f"{option}: {path}", "free the disk, or choose another place"):
        if path.exists() and GENERATOR.encode() not in path.read_bytes()[:500]:
            raise OutputError(
                f"{path}: is there already and is no page of this command, nor a picture; choose "
                f"another place with {option}"
            )
        with new_path(path) as unfinished:
            write_new(unfinished, content)
