"""`axsparse checkpoint`: what it shows, what it finds wrong, what it removes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.exhaustive import by_default
from support.mpirun import LONGEST_SECONDS
from support.resuming import ran
from support.runs import tiny_config
from support.unread import unread

from axsparse.cli.checkpoint import main
from axsparse.runtime.files.run_lock import RunLock
from axsparse.training.checkpoint.checkpoint_folder import saved_steps


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("original") / "run"
    config = tiny_config(train={"steps": 4}, checkpoint={"every": 1, "keep_last": 9})
    ran((1, 1), config, run)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def called(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, list[str], list[str]]:
    """Exit code, and the lines on stdout and stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    out, err = capsys.readouterr()
    return end.value.code, out.splitlines(), err.splitlines()


def test_verify_reads_all_checkpoints_of_a_run_or_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, "verify", run)

    assert (code, err) == (0, [])
    assert out == [f"✓ {run}/checkpoints/step-{step}: 4 files, 111 kB" for step in (1, 2, 3, 4)]
    one = run / "checkpoints" / "step-2"
    assert called(capsys, "verify", one) == (0, [f"✓ {one}: 4 files, 111 kB"], [])


@pytest.mark.parametrize("command", by_default([], ["show", "verify"]))
def test_a_reader_that_goes_away_is_no_mistake(command: str, run: Path) -> None:
    assert unread("checkpoint", command, "run", cwd=run.parent) == (0, b"")


def test_verify_names_what_is_damaged_after_all_is_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    os.truncate(folder / "step-2" / "0000-embed.safetensors", 10)
    (folder / "step-3" / "0001-block0.safetensors").unlink()
    (folder / "step-9.tmp").mkdir()

    code, out, err = called(capsys, "verify", run)

    assert code == 65
    assert [line[0] for line in out] == ["✓", "✗", "✗", "✓", " "]
    assert (
        out[-1] == f"  {folder}/step-9.tmp: not finished, never used; goes with the next checkpoint"
    )
    (line,) = err
    assert line.startswith(
        f"axsparse: error: checkpoint {folder}/step-2: 0000-embed.safetensors has 10 bytes"
    )
    assert called(capsys, "verify", folder / "step-3")[0] == 66


def test_show_says_what_was_saved_without_reading_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-2"
    os.truncate(path / "0000-embed.safetensors", 10)

    code, out, _ = called(capsys, "show", path)

    assert code == 0
    assert out == [
        str(path),
        "  step 2, 2 updates, loss scale 1, 24 samples of random",
        "  4 layers, 27.9k parameters, 8.2k kept, 111 kB",
        out[3],
    ]
    assert out[3].startswith("  fp32, adamw, pruning magnitude, seed 11; axsparse 0.1.0, torch 2.")


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--keep-last", "1"], [4]),
        (["--keep-last", "3"], [4, 3, 2]),
        (["--after", "2"], [2, 1]),
        (["--after", "9"], [4, 3, 2, 1]),
    ],
)
def test_prune_removes_what_is_asked_for(
    arguments: list[str], left: list[int], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = called(capsys, "prune", run, *arguments)

    assert code == 0
    assert saved_steps(run / "checkpoints") == left
    gone = [step for step in (4, 3, 2, 1) if step not in left]
    assert out == [f"removed {run}/checkpoints/step-{step}" for step in gone]


def test_prune_never_removes_the_newest_whole_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 4):
        os.truncate(run / "checkpoints" / f"step-{step}" / "0000-embed.safetensors", 10)

    assert called(capsys, "prune", run, "--keep-last", "1")[0] == 0

    assert saved_steps(run / "checkpoints") == [4, 3, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["prune", "RUN"], 78, "checkpoint prune: give either --keep-last or --after"),
        (["prune", "RUN", "--keep-last", "1", "--after", "1"], 78, "give either --keep-last or"),
        (["prune", "RUN", "--keep-last", "0"], 78, "--keep-last: 0 would leave none; choose at"),
        (["prune", "RUN", "--after", "0"], 78, "--after: 0 would leave no whole checkpoint; choo"),
        (["prune", "RUN/checkpoints"], 78, "give either"),
        (["prune", "RUN/checkpoints", "--after", "1"], 66, "is no run with checkpoints/; name one"),
        (["verify", "RUN/gone"], 66, "neither a checkpoint nor a run that has one; name one"),
        (["show", "RUN/checkpoints/step-7"], 66, "manifest.json cannot be read"),
        (["mend", "RUN"], 78, "invalid choice: 'mend'"),
        ([], 78, "see --help"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    arguments: list[str], code: int, words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = called(capsys, *(text.replace("RUN", str(run)) for text in arguments))

    assert (found, out) == (code, [])
    assert len(err) == 1 and err[0].startswith("axsparse: error: ") and words in err[0]
    assert saved_steps(run / "checkpoints") == [4, 3, 2, 1]


def test_a_run_in_use_is_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = RunLock(run)

    code, _, err = called(capsys, "prune", run, "--keep-last", "1")

    assert code == 74 and "is in use by process" in err[0]
    lock.release()


def test_what_cannot_be_removed_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shutil, "rmtree", fail)

    code, _, err = called(capsys, "prune", run, "--keep-last", "1")

    assert code == 74
    assert f"{run}/checkpoints: cannot be written (Read-only file system); nothing else" in err[0]


def test_it_is_a_command_of_axsparse(run: Path) -> None:
    command = [sys.executable, "-m", "axsparse", "checkpoint", "verify", str(run)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("✓") == 4
