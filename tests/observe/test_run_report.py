"""The page of a run: it says what the records say, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support.pages import body_of, figure_of, rows_of, step_line, words_of
from support.pictures import outside, overlapping

from axsparse.observe.phases import PHASES
from axsparse.observe.run_records import read_records
from axsparse.observe.run_report import report_page
from axsparse.observe.run_view import LayerShare, RunView, SavedStep
from axsparse.observe.trace_file import Span

EVIL = "<script>alert('x')</script>&\"--"


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


def points(page: str, title: str) -> list[str]:
    figure = figure_of(page, title)
    return [circle.findtext("title") or "" for circle in figure.iter("circle")]


def whole(tmp_path: Path, name: str = "one", steps: int = 40) -> RunView:
    """A run that has all there is."""
    masks = '{"step": 7, "masks": "%s", "sparsity": 0.9, "model_state_bytes": 5, '
    masks += '"model_state_bytes_before": 9000000}\n'
    plan = '{"step": 5, "predicted_peak_memory_bytes": 2.5e8, "measured_peak_memory_bytes": 3e8}\n'
    spans = [
        Span(
            step, replica, stage, "compute", f"F{n}", 10.0 + step + n / 9, 10.0 + step + (n + 1) / 9
        )
        for step in (2, 3)
        for replica in (0, 1)
        for stage in (0, 1)
        for n in range(9)
    ]
    return view(
        tmp_path,
        text_of(steps) + masks.replace("%s", "drawn") + plan,
        name,
        settings={"train.steps": "100", "seed": "1"},
        versions={"torch": "2"},
        config_text="seed: 1\n",
        trace="trace/steps-2-3.json",
        spans=spans,
        layers=[LayerShare("embed", 50, 50), LayerShare("block0", 10, 100)],
        layers_from="after step 40",
        checkpoints=[SavedStep(40, 7_700_000), SavedStep(20, None)],
        notes=["a note"],
    )


def test_every_curve_has_every_point(tmp_path: Path) -> None:
    page = report_page([whole(tmp_path)])

    assert points(page, "loss") == [
        *(f"one, step {step}: {5 / step:.5g}" for step in range(1, 41)),
        *(f"one validation, step {step}: {1 / step:.5g}" for step in (10, 20, 30, 40)),
    ]
    assert len(points(page, "perplexity")) == 44
    assert points(page, "learning rate")[-1] == "one, step 40: 0.001"
    assert points(page, "norm of the gradient")[0] == "one, step 1: 3"
    assert len(points(page, "tokens a second")) == 40
    assert points(page, "model state, MB")[0] == "one, step 1: 4 MB"
    assert points(page, "peak, MB; dashed: planned")[-1] == "one planned, step 40: 250 MB"
    columns = figure_of(page, "seconds of a step by phase").iter("rect")
    assert len(list(columns)) == 40 * len(PHASES)


def test_it_tells_masks_sparsity_checkpoints_and_the_last_traced_step(tmp_path: Path) -> None:
    page = report_page([whole(tmp_path)])

    assert rows_of(page, "checkpoint") == [["step 40", "7.7 MB"], ["step 20", "unreadable"]]
    [summary] = rows_of(page, "median step")
    assert summary[:5] == ["one", "40 of 100", "0.1250", "0.0250", "2.000"]
    [mask] = rows_of(page, "what happened")
    assert mask[1:] == ["7", "drawn", "90.00 %", "9.0 MB", "5 B"]
    bars = figure_of(page, "one: removed share of each layer, after step 40")
    assert [r.findtext("title") for r in bars.iter("rect")] == [
        "embed: 50 of 50 parameters are kept",
        "block0: 10 of 100 parameters are kept",
    ]
    assert "Step 3 of one, replica 0" in page
    assert page.count("(compute) 111 ms") == 2 * 9
    assert "a note" in page


def test_no_text_is_no_number_and_none_lies_on_another(tmp_path: Path) -> None:
    runs = [whole(tmp_path, name) for name in ("first", "second", "third")]
    for page in (report_page(runs[:1]), report_page(runs)):
        assert not re.search(r"\b(nan|None|inf|True|False)\b", words_of(page))
        for drawing in body_of(page).iter("svg"):
            assert outside(drawing) == []
            assert overlapping(drawing) == []


def test_nothing_comes_from_elsewhere_and_it_suits_phones_and_the_dark(tmp_path: Path) -> None:
    page = report_page([whole(tmp_path)])

    assert not re.search(r"https?:|src=|href=|url\(|@import|<link|<img|<script", page)
    assert 'name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page


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
            layers=[LayerShare(EVIL, 1, 2)],
            layers_from=EVIL,
            notes=[EVIL],
        )
        for name in (EVIL, EVIL + "2")
    ]
    page = report_page(runs)

    assert "<script" not in page
    assert EVIL in words_of(page)
    body_of(page)


def test_the_table_of_differences_has_the_settings_that_differ_and_no_others(
    tmp_path: Path,
) -> None:
    text = text_of(3)
    same = {"seed": "1", "run_dir": "a"}
    runs = [
        view(tmp_path, text, "a", settings={**same, "precision": "fp32"}, versions={"torch": "1"}),
        view(
            tmp_path,
            text,
            "b",
            settings={**same, "precision": "bf16", "new": "x", "run_dir": "b"},
            versions={"torch": "2"},
        ),
    ]
    page = report_page(runs)

    assert rows_of(page, "setting") == [
        ["precision", "fp32", "bf16"],
        ["version of torch", "1", "2"],
        ["new", "–", "x"],
    ]
    assert {point.split(",")[0] for point in points(page, "loss")} == {"a", "b"}
    alike = report_page(
        [runs[0], view(tmp_path, text, "c", settings=runs[0].settings, versions={"torch": "1"})]
    )
    assert "In no setting and no version." in alike


def test_runs_of_other_models_have_other_metrics(tmp_path: Path) -> None:
    evaluated = json.dumps({"step": 3, "eval_loss": 0.5, "top1": 0.25}) + "\n"
    plain = view(tmp_path, text_of(3), "plain")
    runs = [plain, view(tmp_path, text_of(3) + evaluated, "images")]

    [first, second] = rows_of(report_page(runs), "top1")

    assert [len(first), first[0]] == [len(second), "plain"]
    assert "25.00 %" in second and "25.00 %" not in first


def test_skipped_steps_are_marked_and_nulls_interrupt_curves(tmp_path: Path) -> None:
    text = step_line(1) + step_line(2)
    text += step_line(3, loss=None, grad_norm=None, skipped=True, skip_reason="loss is not finite")
    text += step_line(4, skipped_steps=1) + step_line(5, skipped_steps=1)
    page = report_page([view(tmp_path, text)])

    figure = figure_of(page, "loss")
    assert [cross.findtext("title") for cross in figure.iter("path")] == [
        "one, step 3 was skipped: loss is not finite"
    ]
    assert len(list(figure.iter("polyline"))) == 2
    assert not re.search(r"\b(nan|None)\b", words_of(page))


def test_one_record_of_any_kind_makes_a_page(tmp_path: Path) -> None:
    evaluation = '{"step": 0, "eval_loss": 3.0}\n'
    mask = '{"step": 0, "masks": "drawn", "model_state_bytes": null}\n'
    bare = '{"step": 1, "loss": null}\n'
    for text in (step_line(1), evaluation, mask, bare):
        page = report_page([view(tmp_path, text)])
        assert not re.search(r"\b(nan|None)\b", words_of(page))
        body_of(page)


def test_thousands_of_steps_of_many_runs_stay_below_a_megabyte(tmp_path: Path) -> None:
    text = text_of(3_000)
    spans = [
        Span(1, 0, stage, "compute" if n % 2 else "bubble", f"F{n}", n / 1e3, (n + 1) / 1e3)
        for stage in range(4)
        for n in range(1_000)
    ]
    one = view(tmp_path, text, "run 0", spans=spans, trace="t")
    runs = [RunView(**{**vars(one), "name": f"run {n}"}) for n in range(8)]

    assert len(report_page(runs[:1]).encode()) < 500_000
    assert len(report_page(runs).encode()) < 1_000_000
