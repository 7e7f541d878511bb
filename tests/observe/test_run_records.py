"""Reading metrics.jsonl as runs, killed runs and accidents leave it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages import step_line

from axsparse.observe.run_records import number, read_records

EVALUATION = '{"step": 2, "eval_loss": 2.0, "perplexity": 7.39, "top1": 0.5}\n'


def test_every_kind_of_record_is_told_by_its_key(tmp_path: Path) -> None:
    mask = '{"step": 0, "masks": "drawn", "sparsity": 0.9, "model_state_bytes": 1}\n'
    plan = '{"step": 5, "predicted_peak_memory_bytes": 9.0, "measured_peak_memory_bytes": 8}\n'
    back = '{"step": 1, "spike_step": 3, "spike_loss": null, "usual_loss": 1.0, "jumped": 2}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text(mask + step_line(1) + EVALUATION + plan + back + '{"step": 1, "new": 3}\n')

    found = read_records(path)

    kinds = (found.steps, found.evaluations, found.masks, found.plans)
    assert [len(kind) for kind in kinds] == [1, 1, 1, 1]
    assert not found.is_cut
    assert number(found.evaluations[0], "top1") == 0.5


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_half_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step_line(1) + step_line(2)[:cut])

    found = read_records(path)

    assert found.is_cut and len(found.steps) == 1


def test_what_is_no_finite_number_is_none(tmp_path: Path) -> None:
    line = step_line(1).replace('"loss": 5.0', '"loss": 1e999').replace("2.0", "NaN")
    path = tmp_path / "metrics.jsonl"
    path.write_text(line.replace("4000000", "9" * 400).replace("0.001", '{"a": [1]}'))

    [step] = read_records(path).steps

    assert number(step, "loss") is number(step, "model_state_bytes") is None
    assert number(step, "learning_rate") is None
