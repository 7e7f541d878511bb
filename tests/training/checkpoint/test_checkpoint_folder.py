"""How checkpoints appear and go, and which ones stay."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from axsparse.training.checkpoint.checkpoint_folder import (
    begin,
    commit,
    outdated,
    remove,
    saved_steps,
    unfinished,
)


def saved(folder: Path, *steps: int) -> Path:
    for step in steps:
        commit(begin(folder, step), b"{}")
    return folder


def test_a_checkpoint_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    partial = begin(tmp_path / "new", 40)
    assert partial.name == "step-40.tmp"
    assert saved_steps(tmp_path / "new") == []
    (partial / "file").write_text("contents")

    final = commit(partial, b"manifest")

    assert final.name == "step-40"
    assert (final / "manifest.json").read_bytes() == b"manifest"
    assert (final / "file").read_text() == "contents"
    assert unfinished(tmp_path / "new") == []


def test_the_manifest_is_on_the_disk_before_the_name_and_the_name_before_commit_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []

    def note(folder: Path) -> None:
        synced.append((folder.name, [path.name for path in folder.iterdir()]))

    monkeypatch.setattr("axsparse.training.checkpoint.checkpoint_folder.sync_folder", note)

    commit(begin(tmp_path / "new", 4), b"{}")

    assert synced[-2:] == [("step-4.tmp", ["manifest.json"]), ("new", ["step-4"])]


def test_without_its_manifest_nothing_has_a_checkpoints_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, contents: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    partial = begin(tmp_path, 40)
    monkeypatch.setattr("axsparse.training.checkpoint.checkpoint_folder.write_new", full)

    with pytest.raises(OSError, match="No space left"):
        commit(partial, b"manifest")

    assert saved_steps(tmp_path) == []
    assert unfinished(tmp_path) == [partial]


def test_steps_are_numbers_newest_first_and_other_names_are_none(tmp_path: Path) -> None:
    saved(tmp_path, 5, 40, 9)
    for name in ("step-07", "step-", "step--1", "step-x", "step-1.tmp.x", "other", "step-3.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-50").write_text("no folder")
    (tmp_path / "step-60").symlink_to(tmp_path / "step-5")

    assert saved_steps(tmp_path) == [60, 40, 9, 5]  # one is a link to another disk
    assert [path.name for path in unfinished(tmp_path)] == ["step-3.tmp"]


def test_nothing_is_saved_where_there_is_no_folder(tmp_path: Path) -> None:
    assert saved_steps(tmp_path / "gone") == []
    assert unfinished(tmp_path / "gone") == []

    (tmp_path / "file").write_text("no folder")
    assert saved_steps(tmp_path / "file") == []
    assert unfinished(tmp_path / "file") == []


def test_what_killed_runs_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    for name in ("step-2.old", "step-4.tmp", "step-6.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")

    begin(tmp_path, 4)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4.tmp"]
    assert list((tmp_path / "step-4.tmp").iterdir()) == []


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    (tmp_path / "step-4" / "damaged").write_text("")

    saved(tmp_path, 4)

    assert [path.name for path in (tmp_path / "step-4").iterdir()] == ["manifest.json"]


def test_what_is_half_removed_has_no_name_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2, 4)
    seen: list[list[int]] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append(saved_steps(tmp_path)))

    remove(tmp_path / "step-2")

    assert seen == [[4]]
    assert [path.name for path in unfinished(tmp_path)] == ["step-2.old"]


def all_but(*damaged: int) -> Callable[[int], bool]:
    return lambda step: step not in damaged


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "damaged", "gone"),
    [
        (1, 0, (), [40, 30, 20, 10]),
        (3, 0, (), [20, 10]),
        (9, 0, (), []),
        (1, 20, (), [30, 10]),
        # A damaged one is no reason for a whole one to go, nor does it go before older ones do.
        (1, 0, (50,), [30, 20, 10]),
        (2, 0, (50, 40), [10]),
        (2, 0, (20, 10), [30, 20, 10]),
        (2, 0, (10, 20, 30, 40, 50), []),
    ],
)
def test_the_newest_whole_ones_stay(
    keep_last: int, keep_every: int, damaged: tuple[int, ...], gone: list[int], tmp_path: Path
) -> None:
    saved(tmp_path, 10, 20, 30, 40, 50)

    assert outdated(tmp_path, keep_last, keep_every, all_but(*damaged)) == gone
