"""The page of a run: it says what the records say, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import body_of, figure_of, rows_of, step_line, words_of

from axsparse.observe import charts
from axsparse.observe.charts import Bars, Curve, Lines
from axsparse.observe.phases import PHASES
from axsparse.observe.run_report import (
    RunView,
    memory_charts,
    number,
    phase_chart,
    read_records,
    report_page,
    training_charts,
)
from axsparse.observe.trace_file import Span

EVIL = "<script>alert('x')</script>&\"--"


@pytest.fixture
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time of a page; where tables are looked at, they are left empty."""
    monkeypatch.setattr(charts, "svg", lambda _: "<svg></svg>")


def view(tmp_path: Path, text: str, name: str = "one", **what: Any) -> RunView:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    records = read_records(path)
    return RunView(name=name, records=records, **{"settings": {}, "versions": {}, **what})


def text_of(steps: int, **changed: Any) -> str:
    lines = [step_line(step, **changed) for step in range(1, steps + 1)]
    lines += [
        json.dumps({"step": step, "eval_loss": 1 / step, "perplexity": 2.0}) + "\n"
        for step in range(10, steps + 1, 10)
    ]
    return "".join(lines)


def complete(tmp_path: Path, name: str = "one", steps: int = 40) -> RunView:
    """A run that has all there is."""
    masks = '{"step": 7, "masks": "drawn", "sparsity": 0.9, "model_state_bytes": 5, '
    masks += '"model_state_bytes_before": 9000000, "loss_before": 3.25, "loss_after": 3.5}\n'
    plan = '{"step": 5, "predicted_peak_memory_bytes": 2.5e8, "measured_peak_memory_bytes": 3e8}\n'
    spans = [
        Span(step, replica, stage, "compute", f"F{n}", 10.0 + step + n / 9, 10.1 + step + n / 9)
        for step in (2, 3)
        for replica in (0, 1)
        for stage in (0, 1)
        for n in range(9)
    ]
    return view(
        tmp_path,
        text_of(steps) + masks + plan,
        name,
        settings={"train.steps": "100", "seed": "1"},
        versions={"torch": "2"},
        config_text="seed: 1\n",
        trace="trace/steps-2-3.json",
        spans=spans,
        sparsity=Bars(
            f"{name}: removed share of each layer, after step 40",
            [("embed", [0.0], "0.0 %"), ("block0", [0.9], "90.0 %")],
            ["#123456"],
        ),
        notes=["a note"],
    )


def curves(run: RunView) -> dict[str, Curve]:
    """All curves of training and memory, by the titles of their charts and their own names."""
    lines: list[Lines] = [*training_charts([run]), *memory_charts([run])]
    return {f"{chart.title}: {curve.name}": curve for chart in lines for curve in chart.curves}


def test_every_curve_has_every_point(tmp_path: Path) -> None:
    run = complete(tmp_path)
    found = curves(run)

    loss = "loss, nats a token; dashed: validation"
    assert found[f"{loss}: one"].points == [(n, 5 / n) for n in range(1, 41)]
    assert found[f"{loss}: one validation"].points == [(n, 1 / n) for n in (10, 20, 30, 40)]
    assert found["norm of the gradient: one"].points[0][1] == 3.0
    assert found["model state, MB: one"].points[0][1] == pytest.approx(4.0)
    rise = found["validation loss before and after each pruning, and recovered between: one"]
    assert rise.points == [(7, 3.25), (7, 3.5)]
    planned = found["peak, MB; dashed: planned: one planned"]
    assert planned.is_dashed and planned.points == [(1, 250.0), (40, 250.0)]
    assert {len(curve.points) for curve in found.values()} == {40, 4, 2}
    [phases] = phase_chart(run, 80)
    assert tuple(phases.parts) == PHASES and len(phases.edges) == 41
    assert {seconds for part in phases.parts.values() for seconds in part} == {0.1}


def test_it_tells_masks_sparsity_and_the_last_traced_step(tmp_path: Path) -> None:
    page = report_page([complete(tmp_path)])

    [summary] = rows_of(page, "median step")
    assert summary[:5] == ["one", "40 of 100", "0.1250", "0.0250", "2.000"]
    [mask] = rows_of(page, "what happened")
    assert mask[1:] == ["7", "drawn", "90.00 %", "3.2500 → 3.5000", "9.0 MB", "5 B"]
    bars = figure_of(page, "one: removed share of each layer, after step 40")
    assert [text.text for text in bars.iter("text")] == ["embed", "block0", "0.0 %", "90.0 %"]
    step = figure_of(page, "Step 3 of one, replica 0")
    assert [text.text for text in step.iter("text")].count("F8") == 2
    assert "a note" in page
    assert "learning rate: one 0.001 at every step" in page


def test_a_page_is_one_file_that_suits_phones_and_the_dark(tmp_path: Path) -> None:
    page = report_page([complete(tmp_path, name) for name in ("first", "second")])

    assert not re.search(
        r"https?:|src=|href=\"(?!#|data:)|url\((?!#)|@import|<link|<img|<script", page
    )
    assert 'name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"\b(nan|None|inf|True|False)\b", words_of(page))


def test_names_and_texts_are_escaped(tmp_path: Path) -> None:
    lines = step_line(1) + step_line(2, skipped=True, skip_reason=EVIL)
    lines += json.dumps({"step": 2, "masks": EVIL, "sparsity": 0.1}) + "\n"
    lines += json.dumps({"step": 2, "eval_loss": 0.1, EVIL: 0.5}) + "\n"
    runs = [
        view(
            tmp_path,
            lines,
            name,
            settings={EVIL: name},
            versions={EVIL: EVIL},
            config_text=EVIL,
            trace=EVIL,
            spans=[Span(1, 0, 0, "compute", EVIL, 0.0, 1.0)],
            sparsity=Bars(EVIL, [(EVIL, [0.5], EVIL)], ["#123456"]),
            notes=[EVIL],
        )
        for name in (EVIL, EVIL + "2")
    ]
    page = report_page(runs)

    assert "<script" not in page
    assert EVIL in words_of(page)
    body_of(page)


@pytest.mark.usefixtures("_without_pictures")
def test_the_table_of_differences_has_the_settings_that_differ_and_no_others(
    tmp_path: Path,
) -> None:
    text = text_of(3)
    same = {"seed": "1", "run_dir": "a"}
    more = {**same, "precision": "bf16", "new": "x", "run_dir": "b"}
    runs = [
        view(tmp_path, text, "a", settings={**same, "precision": "fp32"}, versions={"torch": "1"}),
        view(tmp_path, text, "b", settings=more, versions={"torch": "2"}),
    ]

    assert rows_of(report_page(runs), "setting") == [
        ["precision", "fp32", "bf16"],
        ["version of torch", "1", "2"],
        ["new", "–", "x"],
    ]
    alike = view(tmp_path, text, "c", settings=runs[0].settings, versions={"torch": "1"})
    assert "In no setting and no version." in report_page([runs[0], alike])


@pytest.mark.usefixtures("_without_pictures")
def test_skipped_steps_are_marked_with_their_reasons_and_nulls_interrupt_curves(
    tmp_path: Path,
) -> None:
    text = step_line(1) + step_line(2)
    text += step_line(3, loss=None, grad_norm=None, skipped=True, skip_reason="loss is not finite")
    text += step_line(4, skipped_steps=1) + step_line(5, skipped_steps=1)
    run = view(tmp_path, text)

    page = report_page([run])

    assert rows_of(page, "skipped step") == [["one", "3", "loss is not finite"]]
    loss = next(iter(training_charts([run])))
    assert (loss.crosses, loss.curves[0].points[2]) == ([3], (3, None))
    assert not re.search(r"\b(nan|None)\b", words_of(page))


EVALUATION = '{"step": 2, "eval_loss": 2.0, "perplexity": 7.39, "top1": 0.5}\n'


def test_every_kind_of_record_is_told_by_its_key(tmp_path: Path) -> None:
    mask = '{"step": 0, "masks": "drawn", "sparsity": 0.9, "model_state_bytes": 1}\n'
    plan = '{"step": 5, "predicted_peak_memory_bytes": 9.0, "measured_peak_memory_bytes": 8}\n'
    back = '{"step": 1, "spike_step": 3, "spike_loss": null, "usual_loss": 1.0, "jumped": 2}\n'
    text = mask + step_line(1) + EVALUATION + plan + back + '{"step": 1, "new": 3}\n'

    found = view(tmp_path, text).records

    kinds = (found.steps, found.evaluations, found.masks, found.plans)
    assert [len(kind) for kind in kinds] == [1, 1, 1, 1]
    assert not found.is_cut
    assert number(found.evaluations[0], "top1") == 0.5


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_half_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    found = view(tmp_path, step_line(1) + step_line(2)[:cut]).records

    assert found.is_cut and len(found.steps) == 1


def test_what_is_no_finite_number_is_none(tmp_path: Path) -> None:
    line = step_line(1).replace('"loss": 5.0', '"loss": 1e999').replace("2.0", "NaN")
    line = line.replace("4000000", "9" * 400).replace("0.001", '{"a": [1]}')

    [step] = view(tmp_path, line).records.steps

    assert number(step, "loss") is number(step, "model_state_bytes") is None
    assert number(step, "learning_rate") is None
