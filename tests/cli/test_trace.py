"""`axsparse trace compare`, on made-up traces and on those of a run and its simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.mpirun import run_mpirun

from axsparse.observe.phases import PHASES
from axsparse.observe.trace_file import Span, read, write
from axsparse.runtime.errors import EXIT_CONFIG, EXIT_MISSING


def test_the_largest_differences_come_first(axsparse: Axsparse, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write(first, [Span(1, 0, 0, "compute", "F0", 0, 2), Span(1, 0, 0, "p2p", "p2p", 2, 2.5)], "a")
    write(
        second, [Span(1, 0, 0, "compute", "F0", 0, 2.1), Span(1, 0, 0, "p2p", "p2p", 2.1, 4)], "b"
    )

    code, screen, _ = axsparse("trace", "compare", first, second, "--most", 1)

    lines = screen.splitlines()
    assert code == 0
    assert lines[0] == "step: A 2.5 s, B 4 s (+60.0 %)"
    assert lines[-1].split() == ["0", "p2p", "0.5", "1.9", "+1.4", "+56.0"]
    assert len(lines) == 4
    write(second, [Span(1, 0, 0, "compute", "F0", 0, 2)], "a phase is missing")
    _, screen, _ = axsparse("trace", "compare", first, second)
    assert screen.splitlines()[3].split() == ["0", "p2p", "0.5", "0", "-0.5", "-20.0"]


def test_traces_of_other_layouts_are_refused(axsparse: Axsparse, tmp_path: Path) -> None:
    write(tmp_path / "a", [Span(1, 0, 0, "compute", "F0", 0, 2)], "a")
    write(tmp_path / "b", [Span(1, 0, stage, "compute", "F0", 0, 1) for stage in (0, 1)], "b")

    said = axsparse("trace", "compare", tmp_path / "a", tmp_path / "b")

    assert_one_line(
        said,
        EXIT_CONFIG,
        "trace compare: A has 1 stage and B 2 stages, whose phases are not those of the same "
        "layers; compare traces of one layout: axsparse plan --set layout.g_inter=N simulates "
        "that of a run",
    )


def test_mistakes_are_one_line(axsparse: Axsparse) -> None:
    gone = axsparse("trace", "compare", "none.json", "none.json")
    assert_one_line(gone, EXIT_MISSING, "trace none.json: cannot be read")
    for words, text in (
        (["a", "b", "--most", "all"], "argument --most: 'all' is no whole number from 0 to"),
        (["a"], "the following arguments are required: B"),
    ):
        assert_one_line(axsparse("trace", "compare", *words), EXIT_CONFIG, text)


@pytest.mark.exhaustive
def test_a_real_run_leaves_a_trace_that_a_simulated_one_compares_with(
    axsparse: Axsparse, tmp_path: Path
) -> None:
    small = ["--config", "quickstart.yaml", "--set", "model.hidden_size=64"]
    small += ["--set", "model.num_layers=2", "--set", "layout.g_inter=2"]
    own = ["--set", "train.trace=2", "--set", "train.peak_flops=1e12", "--steps", "3"]
    own += ["--set", "train.eval_steps=0", "--run-dir", "run"]
    done = run_mpirun(2, ["-m", "axsparse", "train", *small, *own], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = ["--gpus", "2", "--microbatch-size", "2", "--trace", "simulated.json", "--json"]
    done = run_mpirun(1, ["-m", "axsparse", "plan", *small, *plan], cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    real = read(tmp_path / "run" / "trace" / "steps-2-3.json")
    simulated = read(tmp_path / "simulated.json")
    assert {span.step for span in real} == {2, 3}
    assert {span.phase for span in real} <= set(PHASES)

    def actions(spans: list[Span]) -> set[tuple[int, str]]:
        return {(span.stage, span.name) for span in spans if span.phase == "compute"}

    assert {(0, "F0"), (1, "F23"), (0, "B23"), (1, "B0")} <= actions(real)
    assert actions(simulated) <= actions(real)
    files = (tmp_path / "simulated.json", tmp_path / "run" / "trace" / "steps-2-3.json")
    code, screen, _ = axsparse("trace", "compare", *files)
    assert code == 0
    assert "compute" in screen and "B − A" in screen
