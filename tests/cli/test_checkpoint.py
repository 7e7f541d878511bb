"""`axsparse checkpoint`: what it shows, what it finds wrong, what it removes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.resuming import ran
from support.runs import tiny_config

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


def test_verify_reads_all_checkpoints_of_a_run_or_one(run: Path, axsparse: Axsparse) -> None:
    code, out, err = axsparse("checkpoint", "verify", run)

    assert (code, err) == (0, "")
    lines = [f"✓ {run}/checkpoints/step-{step}: 4 files, 111 kB\n" for step in (1, 2, 3, 4)]
    assert out == "".join(lines)
    assert axsparse("checkpoint", "verify", run / "checkpoints" / "step-2") == (0, lines[1], "")


def test_verify_names_what_is_damaged_after_all_is_read(run: Path, axsparse: Axsparse) -> None:
    folder = run / "checkpoints"
    os.truncate(folder / "step-2" / "0000-embed.safetensors", 10)
    (folder / "step-3" / "0001-block0.safetensors").unlink()
    (folder / "step-9.tmp").mkdir()

    code, out, err = axsparse("checkpoint", "verify", run)

    assert code == 65
    lines = out.splitlines()
    assert [line[0] for line in lines] == ["✓", "✗", "✗", "✓", " "]
    unfinished = f"  {folder}/step-9.tmp: not finished, never used; goes with the next checkpoint"
    assert lines[-1] == unfinished
    assert err.count("\n") == 1
    assert err.startswith(
        f"axsparse: error: checkpoint {folder}/step-2: 0000-embed.safetensors has 10 bytes"
    )
    assert axsparse("checkpoint", "verify", folder / "step-3")[0] == 66


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--keep-last", "2"], [4, 3]),
        (["--keep-last", "3"], [4, 3, 2]),
        (["--after", "2"], [2, 1]),
        (["--after", "9"], [4, 3, 2, 1]),
    ],
)
def test_prune_removes_what_is_asked_for(
    arguments: list[str], left: list[int], run: Path, axsparse: Axsparse
) -> None:
    code, out, _ = axsparse("checkpoint", "prune", run, *arguments)

    assert code == 0
    assert saved_steps(run / "checkpoints") == left
    gone = [step for step in (4, 3, 2, 1) if step not in left]
    assert out == "".join(f"removed {run}/checkpoints/step-{step}\n" for step in gone)


def test_prune_keeps_the_newest_that_a_later_step_has_trained_on(
    run: Path, axsparse: Axsparse
) -> None:
    """Later checkpoints may hold weights that a last update has ruined."""
    code, out, _ = axsparse("checkpoint", "prune", run, "--keep-last", "1")

    assert (code, saved_steps(run / "checkpoints")) == (0, [4, 3])
    assert out == (
        f"kept {run}/checkpoints/step-3: it is the newest whose weights a later step has trained "
        f"on\nremoved {run}/checkpoints/step-2\nremoved {run}/checkpoints/step-1\n"
    )


def test_what_cannot_be_removed_is_told(
    run: Path, axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fail)

    said = axsparse("checkpoint", "prune", run, "--after", "3")

    reason = "cannot be written (Read-only file system); nothing else went"
    assert_one_line(said, 74, f"{run}/checkpoints: {reason}")
