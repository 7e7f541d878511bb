"""The contents of metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.pages import STEP_RECORD

from axsparse.observe.metrics import (
    EvalRecord,
    MaskRecord,
    PlanRecord,
    Record,
    StepRecord,
    perplexity,
)
from axsparse.observe.phases import PHASES
from axsparse.observe.sinks import MetricsFile
from axsparse.runtime.errors import OutputError

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


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            EvalRecord(5, 0.0, {"perplexity": perplexity(0.0), "top1": math.nan}),
            {"step": 5, "eval_loss": 0.0, "perplexity": 1.0, "top1": None},
        ),
        (
            MaskRecord(7, "pruned", {"sparsity": 0.9, "churn": math.inf}, 10, 80),
            {
                **{"step": 7, "masks": "pruned", "sparsity": 0.9, "churn": None},
                **{"model_state_bytes": 10, "model_state_bytes_before": 80},
            },
        ),
    ],
)
def test_metrics_are_keys_of_their_own_and_what_is_not_finite_is_null(
    record: Record, line: dict[str, object], tmp_path: Path
) -> None:
    assert written(tmp_path, record) == [line]


def test_a_perplexity_beyond_all_floats_is_infinite() -> None:
    assert (perplexity(2.0), perplexity(1e4)) == (math.exp(2.0), math.inf)


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = written(tmp_path, replace(STEP_RECORD, step=step))

    assert [line["step"] for line in lines] == [1, 2]


def test_what_cannot_be_written_is_named_with_its_mend(tmp_path: Path) -> None:
    with pytest.raises(
        OutputError,
        match=r"/gone/metrics\.jsonl: cannot be written \(No such file or directory\); "
        "free space there or choose another run_dir",
    ):
        MetricsFile(tmp_path / "gone" / "metrics.jsonl")
    metrics = MetricsFile(Path("/dev/full"))
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left"):
        metrics.write(STEP_RECORD)
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left"):
        metrics.close()


def test_the_page_names_every_field_of_every_record() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))

    for record in (StepRecord, EvalRecord, MaskRecord, PlanRecord):
        # The entries of `metrics` are keys of their own in the file.
        assert {field.name for field in fields(record)} - {"metrics"} <= named, record
