"""`axsparse trace compare`, on made-up traces and on those of a run and its simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mpirun import run_mpirun
from support.unread import unread

from axsparse.cli.trace import main
from axsparse.observe.phases import PHASES
from axsparse.observe.trace_file import Span, read, write
from axsparse.runtime.errors import EXIT_CONFIG, EXIT_MISSING


def told(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([*args])
    screen = capsys.readouterr()
    return int(end.value.code or 0), screen.out, screen.err


def test_the_largest_differences_come_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write(first, [Span(1, 0, 0, "compute", "F0", 0, 2), Span(1, 0, 0, "p2p", "p2p", 2, 2.5)], "a")
    write(
        second, [Span(1, 0, 0, "compute", "F0", 0, 2.1), Span(1, 0, 0, "p2p", "p2p", 2.1, 4)], "b"
    )

    code, screen, _ = told(capsys, "compare", str(first), str(second), "--most", "1")

    lines = screen.splitlines()
    assert code == 0
    assert lines[0] == "step: A 2.5 s, B 4 s (+60.0 %)"
    assert lines[-1].split() == ["0", "p2p", "0.5", "1.9", "+1.4", "+56.0"]
    assert len(lines) == 4


def test_traces_of_other_layouts_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "a", [Span(1, 0, 0, "compute", "F0", 0, 2)], "a")
    write(tmp_path / "b", [Span(1, 0, stage, "compute", "F0", 0, 1) for stage in (0, 1)], "b")

    code, screen, errors = told(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"))

    assert (code, screen) == (EXIT_CONFIG, "")
    assert errors == (
        "axsparse: error: trace compare: A has 1 stage and B 2 stages, whose phases are not those "
        "of the same layers; compare traces of one layout: axsparse plan --set layout.g_inter=N "
        "simulates that of a run\n"
    )


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["compare", "none.json", "none.json"], EXIT_MISSING, "trace none.json: cannot be read"),
        (["compare", "a", "b", "--most", "all"], EXIT_CONFIG, "--most: 'all' is no number of diff"),
        (["paint"], EXIT_CONFIG, "trace: no command 'paint'; see axsparse trace --help"),
        (["compare", "a"], EXIT_CONFIG, "the following arguments are required: B"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, text: str
) -> None:
    found, _, errors = told(capsys, *args)

    assert found == code
    assert len(errors.splitlines()) == 1
    assert text in errors


def test_a_reader_that_goes_away_is_no_mistake(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [Span(1, 0, 0, "compute", "F0", 0, 2)], "a")

    assert unread("trace", "compare", "a.json", "a.json", cwd=tmp_path) == (0, b"")


def test_without_a_command_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    code, screen, _ = told(capsys)

    assert code == 0
    assert screen.startswith("usage: axsparse trace compare A B")


@pytest.mark.exhaustive
def test_a_real_run_leaves_a_trace_that_a_simulated_one_compares_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
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
    code, screen, _ = told(
        capsys,
        "compare",
        str(tmp_path / "simulated.json"),
        str(tmp_path / "run" / "trace" / "steps-2-3.json"),
    )
    assert code == 0
    assert "compute" in screen and "B − A" in screen
