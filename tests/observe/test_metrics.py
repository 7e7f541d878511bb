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
    MetricsFile,
    PlanRecord,
    StepRecord,
    perplexity,
)
from axsparse.observe.phases import PHASES
from axsparse.runtime.errors import OutputError

FIELDS = [
    "step",
    "time",
    "loss",
    "learning_rate",
    "grad_norm",
    "loss_scale",
    "skipped",
    "skip_reason",
    "skipped_steps",
    "tokens",
    "step_seconds",
    "data_seconds",
    "compute_seconds",
    "compress_seconds",
    "optimizer_seconds",
    "p2p_seconds",
    "bubble_seconds",
    "collective_seconds",
    "other_seconds",
    "tokens_per_second",
    "model_flops_per_second",
    "mfu",
    "model_state_bytes",
    "gradient_bytes_sent",
    "p2p_bytes_sent",
    "peak_memory_bytes",
]


def read(path: Path) -> list[dict[str, object]]:
    """The lines of a file of strict JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_step_is_one_line_with_the_documented_fields_in_order(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write(STEP_RECORD)

    (line,) = read(tmp_path / "metrics.jsonl")
    assert list(line) == FIELDS
    assert line == {name: getattr(STEP_RECORD, name) for name in FIELDS}


def test_every_phase_of_a_step_has_its_field() -> None:
    names = [field.name for field in fields(StepRecord)]
    first = names.index("step_seconds") + 1

    assert names[first : first + len(PHASES)] == [f"{phase}_seconds" for phase in PHASES]


def test_an_evaluation_is_a_line_of_its_own(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write(EvalRecord(5, 0.0, {"perplexity": perplexity(0.0), "top1": math.nan}))

    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 5, "eval_loss": 0.0, "perplexity": 1.0, "top1": None}
    ]


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert perplexity(2.0) == math.exp(2.0)


def test_a_perplexity_beyond_all_floats_is_infinite() -> None:
    assert perplexity(1e4) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write(replace(STEP_RECORD, grad_norm=value))

    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["grad_norm"] is None
    assert line["loss"] == STEP_RECORD.loss


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write(STEP_RECORD)
        lines = read(tmp_path / "metrics.jsonl")

    assert len(lines) == 1


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
            metrics.write(replace(STEP_RECORD, step=step))

    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_leaving_the_block_closes_the_file(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        pass

    with pytest.raises(ValueError, match="closed file"):
        metrics.write(STEP_RECORD)


def test_a_missing_folder_is_named_with_its_mend(tmp_path: Path) -> None:
    with pytest.raises(
        OutputError,
        match=r"/gone/metrics\.jsonl: cannot be written \(No such file or directory\); "
        "free space there or choose another run_dir",
    ):
        MetricsFile(tmp_path / "gone" / "metrics.jsonl")


def test_a_full_disk_is_named_when_the_line_is_written_and_when_the_file_is_closed() -> None:
    metrics = MetricsFile(Path("/dev/full"))

    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left"):
        metrics.write(STEP_RECORD)
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left"):
        metrics.close()


def test_a_change_of_masks_is_a_line_with_its_figures_as_keys(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        metrics.write(MaskRecord(7, "pruned", {"sparsity": 0.9, "churn": math.inf}, 10, 80))

    assert json.loads(path.read_text()) == {
        "step": 7,
        "masks": "pruned",
        "sparsity": 0.9,
        "churn": None,
        "model_state_bytes": 10,
        "model_state_bytes_before": 80,
    }


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_names_every_field_of_every_record() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))

    for record in (StepRecord, EvalRecord, MaskRecord, PlanRecord):
        # The entries of `metrics` are keys of their own in the file.
        assert {field.name for field in fields(record)} - {"metrics"} <= named, record
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)[: len(FIELDS)] == FIELDS
