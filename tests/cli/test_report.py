"""`axsparse report`: what it reads of a run directory, what it refuses, where it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.pages import figure_of, rows_of, step_line, words_of, write_trace

from axsparse.observe import charts
from axsparse.observe.trace_file import Span, file_name
from axsparse.runtime.errors import EXIT_CONFIG

CONFIG = "# axsparse 0.1.0\n# torch 2\nlayout:\n  split: [4, 4]\nseed: {seed}\nrun_dir: x\n"


def make_run(path: Path, steps: int = 3, seed: str = "1") -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(step_line(n) for n in range(1, steps + 1)))
    (path / "config.yaml").write_text(CONFIG.format(seed=seed))
    return path


def test_a_run_gets_a_page_which_a_later_one_replaces(axsparse: Axsparse, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, screen, _ = axsparse("report", run)
    assert code == 0 and screen.startswith(f"{run}/report.html: ")

    with (run / "metrics.jsonl").open("a") as file:
        file.write(step_line(4) + step_line(5)[:50])  # killed in the middle of a line
    assert axsparse("report", run)[0] == 0

    page = (run / "report.html").read_text()
    assert rows_of(page, "median step")[0][:2] == ["run", "4"]
    figure_of(page, "loss")
    assert "the last line of metrics.jsonl is cut off" in page
    assert rows_of(page, "version") == [["axsparse", "0.1.0"], ["torch", "2"]]
    assert sorted(path.name for path in run.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
    ]


def test_runs_are_compared_under_names_that_differ(axsparse: Axsparse, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run", seed=name) for name in ("1", "2")]

    code, _, _ = axsparse("report", *runs, "--out", tmp_path / "both.html")

    page = (tmp_path / "both.html").read_text()
    assert code == 0
    assert rows_of(page, "setting") == [["seed", "1", "2"]]
    assert [row[0] for row in rows_of(page, "median step")] == [str(run) for run in runs]
    assert not (runs[0] / "report.html").exists()


def test_the_trace_of_the_latest_steps_is_shown_whenever_it_was_copied(
    axsparse: Axsparse, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    for step in (9, 10, 2):
        span = Span(step, 0, 0, "compute", "F0", 0.0, 1.0)
        write_trace(run / "trace" / file_name(range(step, step + 1)), [span])
    write_trace(run / "trace" / "planned.json", [Span(99, 0, 0, "compute", "F0", 0.0, 1.0)])

    assert axsparse("report", run)[0] == 0

    assert "Step 10 of run, replica 0" in words_of((run / "report.html").read_text())


def test_what_cannot_be_read_becomes_a_note(axsparse: Axsparse, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_trace(run / "trace" / "steps-2-2.json", [Span(2, 0, 0, "compute", "F0", 0.0, 1.0)])
    (run / "trace" / "steps-3-3.json").write_text('{"traceEvents": [')  # is being written
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    (run / "config.yaml").write_text("pruning: {mask: gone.safetensors}\nseed: [1, {a: b}]\n")
    other = make_run(tmp_path / "other")
    (other / "checkpoints").symlink_to("checkpoints")
    assert axsparse("report", other)[0] == 0
    assert "checkpoints cannot be read (Too many" in words_of((other / "report.html").read_text())

    assert axsparse("report", run)[0] == 0

    page = (run / "report.html").read_text()
    words = words_of(page)
    assert "steps-3-3.json: no trace of axsparse" in words
    assert "Step 2 of run, replica 0" in words
    assert "step-3: manifest.json cannot be read" in words


def test_charts_need_matplotlib(
    axsparse: Axsparse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None)

    said = axsparse("report", make_run(tmp_path / "run"))

    lacking = "drawn by matplotlib, which is not installed; pip install 'axsparse[plot]'"
    assert_one_line(said, EXIT_CONFIG, lacking)
