"""The contents of metrics.jsonl."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from support.pages import STEP_RECORD
from support.resuming import ran
from support.runs import mlp, tiny_config, vector_data

from axsparse.observe import metrics
from axsparse.observe.metrics import (
    EvalRecord,
    MaskRecord,
    MetricsFile,
    PlanRecord,
    Record,
    SinkThread,
    StepRecord,
    Write,
    open_records,
    reject_missing_packages,
    values,
)
from axsparse.observe.phases import PHASES
from axsparse.runtime.errors import ConfigError, OutputError
from axsparse.runtime.files.run_folder import RunMark

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def read(path: Path) -> list[dict[str, object]]:
    """The lines of a file of strict JSON."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=reject) for line in lines]


def written(folder: Path, *records: Record) -> list[dict[str, object]]:
    """The lines that records become, each of which can be read as soon as it is written."""
    path = folder / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        for record in records:
            metrics.write(record)
        lines = read(path)
    with pytest.raises(ValueError, match="closed file"):
        metrics.write(STEP_RECORD)
    return lines


def test_a_step_is_one_line_with_the_documented_fields_in_order(tmp_path: Path) -> None:
    (line,) = written(tmp_path, STEP_RECORD)

    names = [field.name for field in fields(StepRecord)]
    assert line == {name: getattr(STEP_RECORD, name) for name in names}
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)[: len(line)] == [*line]
    first = names.index("step_seconds") + 1
    assert names[first : first + len(PHASES)] == [f"{phase}_seconds" for phase in PHASES]


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "moved": lambda path: path.rename(path.with_name("old")),
    "emptied": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_records_go_on_where_theirs_were_moved_removed_or_emptied(
    lose: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    RunMark.of(tmp_path)
    with closing(MetricsFile(path)) as metrics:
        metrics.write(STEP_RECORD)
        lose(path)
        for step in (2, 3):
            metrics.write(replace(STEP_RECORD, step=step))

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3]
    assert capsys.readouterr().err.count(f"warning: {path}: was moved, removed or emptied") == 1


def test_records_go_into_no_directory_that_took_the_place_of_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    RunMark.of(path.parent)
    with closing(MetricsFile(path)) as metrics:
        path.parent.rename(tmp_path / "moved")
        path.parent.mkdir()
        for has_mark in (False, True):
            if has_mark:
                RunMark.of(path.parent)  # of another run
            with pytest.raises(OutputError, match="run is not the directory of this run any more"):
                metrics.write(STEP_RECORD)

    assert not path.exists()


def test_records_that_a_full_disk_does_not_take_are_told() -> None:
    metrics = MetricsFile(Path("/dev/full"))
    write = partial(metrics.write, STEP_RECORD)
    for use in (write, write, metrics.close):  # the rest of the failed write fails again
        with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left"):
            use()


def test_the_page_names_every_field_of_every_record() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))

    for record in (StepRecord, EvalRecord, MaskRecord, PlanRecord):
        # The entries of `metrics` are keys of their own in the file.
        assert {field.name for field in fields(record)} - {"metrics"} <= named, record


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Stand-ins for both packages; none of them needs to be installed."""
    both = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", both.board)
    monkeypatch.setitem(sys.modules, "wandb", both.wandb)
    monkeypatch.setattr(metrics, "find_spec", lambda name: name)
    yield both
    left = [thread for thread in threading.enumerate() if "logging." in thread.name]
    assert not left, "a sink's thread has outlived its run"


def recorded(run: Path, steps: range = range(1, 5), **observe: Any) -> list[Record]:
    """Write steps, the second one with an evaluation, as a run in this folder does."""
    run.mkdir(exist_ok=True)
    config = tiny_config(logging=observe)
    records: list[Record] = []
    with closing(open_records(config, run, run / "metrics.jsonl")) as file:
        for step in steps:
            records.append(replace(STEP_RECORD, step=step, loss=1 / step))
            records += [EvalRecord(step, 0.5, {"top1": 0.25})] * (step % 2 == 0)
        for record in records:
            file.write(record)
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= len(records)
    return records


def test_tensorboard_gets_every_number_of_every_record(tmp_path: Path, packages: Mock) -> None:
    records = recorded(tmp_path / "run", tensorboard=True)

    opened = packages.board.SummaryWriter
    opened.assert_called_once_with(str(tmp_path / "run" / "tensorboard"), purge_step=1)
    *calls, last = opened.return_value.mock_calls
    assert last == call.close()
    for record in records:
        kind = "validation" if isinstance(record, EvalRecord) else "train"
        for name, value in values(record).items():
            if isinstance(value, (int, float)) and name != "step":
                assert call.add_scalar(f"{kind}/{name}", value, record.step) in calls, name
    assert sum(each.args[0] == "train/loss" for each in calls) == 4


def test_a_run_that_resumes_replaces_later_curves_and_stays_one_run(
    tmp_path: Path, packages: Mock
) -> None:
    for steps in (range(1, 4), range(3, 5)):
        recorded(tmp_path / "run", steps, tensorboard=True, wandb="digits")

    opened, init = packages.board.SummaryWriter.call_args_list, packages.wandb.init
    assert [each.kwargs["purge_step"] for each in opened] == [1, 3]
    first, second = (each.kwargs for each in init.call_args_list)
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["resume"]) == ("digits", "run", "allow")
    assert first["config"]["optimizer"]["learning_rate"] == 0.01
    logged = [each.args[0] for each in init.return_value.log.call_args_list]
    assert [one["step"] for one in logged if "train/loss" in one] == [1, 2, 3, 3, 4]
    assert init.return_value.mock_calls[-1] == call.finish()


def test_a_sink_that_fails_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, packages: Mock, capfd: pytest.CaptureFixture[str]
) -> None:
    full = OSError("no space\nleft on device")
    packages.board.SummaryWriter.return_value.add_scalar.side_effect = [None, None, full]

    recorded(tmp_path / "run", tensorboard=True)

    warnings = [line for line in capfd.readouterr().err.splitlines() if "logging." in line]
    assert warnings == [
        "axsparse: warning: logging.tensorboard: OSError: no space left on device; the run goes on "
        "without it"
    ]


@pytest.mark.parametrize("failure", [SystemExit(1), RuntimeError()])
def test_a_sink_that_cannot_be_opened_is_one_warning(
    failure: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    def open_sink(step: int) -> AbstractContextManager[Write]:
        raise failure

    thread = SinkThread("logging.wandb", open_sink)
    for step in range(3):
        thread.write(EvalRecord(step, 1.0, {}))
    thread.close()

    assert capfd.readouterr().err.count("warning: logging.wandb: ") == 1


@pytest.mark.parametrize(
    ("observe", "message"),
    [
        ({"tensorboard": True}, r"logging.tensorboard \(configure\): True, but the package tensor"),
        ({"wandb": "mine"}, r"mine, but the package wandb is not installed; pip install 'axsparse"),
    ],
)
def test_a_missing_package_is_told_before_anything_begins(
    observe: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    config = tiny_config(logging=observe)

    with pytest.raises(ConfigError, match=message):
        reject_missing_packages(config.named("tiny"))
    with pytest.raises(ConfigError, match="is not installed"):
        ran((1, 1), config, tmp_path / "run", model=lambda _: mlp(), data=vector_data())
    assert not (tmp_path / "run").exists()


def test_tensorboard_itself_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    recorded(tmp_path / "run", tensorboard=True)

    read = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = {event.step: event.value for event in read.Scalars("train/loss")}
    assert losses == pytest.approx({step: 1 / step for step in range(1, 5)}, rel=1e-6)
