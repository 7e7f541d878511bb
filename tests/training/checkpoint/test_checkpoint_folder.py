"""How checkpoints appear and go, and which ones stay."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.resuming import signed

from axsparse.config.schema import CheckpointConfig, Config
from axsparse.runtime.errors import AxsparseError, MissingInputError
from axsparse.training.checkpoint import checkpoint_folder
from axsparse.training.checkpoint.checkpoint_folder import (
    CheckpointManifest,
    away,
    begin,
    commit,
    manifest_bytes,
    outdated,
    parse_manifest,
    read_manifest,
    remove,
    saved_steps,
    unfinished,
)
from axsparse.training.progress import BestEntry, Progress


def saved(folder: Path, *steps: int) -> Path:
    for step in steps:
        commit(begin(folder, step), b"{}")
    return folder


def test_a_checkpoint_has_its_name_once_it_is_whole_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest before the name, and the name before `commit` returns."""
    synced: list[tuple[str, list[str]]] = []

    def note(folder: Path) -> None:
        synced.append((folder.name, sorted(path.name for path in folder.iterdir())))

    monkeypatch.setattr(checkpoint_folder, "sync_folder", note)
    partial = begin(tmp_path / "new", 40)
    assert saved_steps(tmp_path / "new") == []
    (partial / "file").write_text("contents")

    final = commit(partial, b"manifest")

    assert synced[-2:] == [("step-40.tmp", ["file", "manifest.json"]), ("new", ["step-40"])]
    assert (final / "manifest.json").read_bytes() == b"manifest"
    assert unfinished(tmp_path / "new") == []


def test_steps_are_numbers_newest_first_and_other_names_are_none(tmp_path: Path) -> None:
    saved(tmp_path, 5, 40, 9)
    for name in ("step-07", "step-", "step--1", "step-x", "step-1.tmp.x", "other", "step-3.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-50").write_text("no folder")
    (tmp_path / "step-60").symlink_to(tmp_path / "step-5")

    assert saved_steps(tmp_path) == [60, 40, 9, 5]  # one is a link to another disk
    assert [path.name for path in unfinished(tmp_path)] == ["step-3.tmp"]
    for name in ("gone", "step-50"):
        assert (saved_steps(tmp_path / name), unfinished(tmp_path / name)) == ([], [])


def test_a_link_to_a_disk_that_is_away_is_passed_over_until_its_step_is_saved_again(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 5)
    (tmp_path / "step-70").symlink_to(tmp_path / "disk" / "step-70")

    assert (saved_steps(tmp_path), away(tmp_path)) == ([5], [tmp_path / "step-70"])
    final = commit(begin(tmp_path, 70), b"{}")
    assert not final.is_symlink() and saved_steps(tmp_path) == [70, 5]


def test_a_file_by_the_name_of_a_checkpoint_stays_aside(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step-4").write_text("a user's")

    commit(begin(tmp_path, 4), b"{}")

    assert saved_steps(tmp_path) == [4]
    assert "step-4.old: was step-4, and has files that no run has written" in capfd.readouterr().err
    assert (tmp_path / "step-4.old").read_text() == "a user's"


def test_what_killed_runs_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    for name in ("step-2.old", "step-4.tmp", "step-6.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0000-block0.safetensors").write_text("")

    begin(tmp_path, 4)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4.tmp"]
    assert list((tmp_path / "step-4.tmp").iterdir()) == []


def test_what_is_half_removed_has_no_name_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2, 4)
    seen: list[list[int]] = []
    monkeypatch.setattr(
        checkpoint_folder, "delete_own", lambda *_: seen.append(saved_steps(tmp_path))
    )

    remove(tmp_path / "step-2")

    assert seen == [[4]]
    assert [path.name for path in unfinished(tmp_path)] == ["step-2.old"]


@pytest.mark.parametrize("name", ["step-2.old", "step-2.old-2"])
def test_copies_and_files_of_the_user_stay_under_names_of_removed_ones(
    name: str, tmp_path: Path
) -> None:
    saved(tmp_path, 2)
    shutil.copytree(tmp_path / "step-2", tmp_path / name)
    for result in ("first", "second"):
        (saved(tmp_path, 2) / "step-2" / result).touch()
        remove(tmp_path / "step-2")

    begin(tmp_path, 4)

    assert (tmp_path / name / "manifest.json").exists()
    left = {path.parent.name for path in tmp_path.glob("*/*") if path.stat().st_size == 0}
    assert left == {"step-2.old", "step-2.old-2", "step-2.old-3"} - {name}


def test_a_users_copy_stays_under_the_name_of_an_unfinished_one(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-2.tmp")
    remove(tmp_path / "step-2")
    (saved(tmp_path, 6) / "step-8.tmp").mkdir()
    (tmp_path / "step-8.tmp" / "manifest.json").touch()  # killed before it had its name

    assert [path.name for path in unfinished(tmp_path)] == ["step-8.tmp"]
    saved(tmp_path, 2)
    there = {path.parent.name for path in tmp_path.glob("*/manifest.json")}
    assert there == {"step-2", "step-2.tmp.old", "step-4", "step-6"}


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

    settings = CheckpointConfig(every=10, keep_last=keep_last, keep_every=keep_every)
    progress = Progress.at_start(Config())
    assert outdated(tmp_path, settings, progress, all_but(*damaged)) == gone


def test_the_best_stays_and_the_newest_that_a_later_step_has_trained_on(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40, 50)
    progress = Progress.at_start(Config())
    progress.last_good, progress.best = 41, BestEntry(step=10, loss=1.0)

    found = outdated(tmp_path, CheckpointConfig(keep_last=1), progress, all_but(40))

    assert found == [40, 20]


HASH = "0123456789abcdef" * 2


def values() -> dict[str, Any]:
    return {
        "format": 2,
        "run": "0123",
        "progress": {
            **{"step": 4, "updates": 3, "schedule_start": 1, "masks_changed": None},
            **{"evaluated": True, "masked": False, "loss_scale": 0.1, "good_steps": 3},
            "skipped_at_floor": 0,
        },
        "method_state": {"distances": [0.1, 1 / 3], "last_look": 2},
        "data": {"name": "random", "fingerprint": "0", "samples": 40, "position": 48},
        "config": {"seed": 1, "layout": {"split": [1, 2]}, "batch": {"global_batch_size": 12}},
        "versions": {"torch": "2"},
        "git": None,
        "layers": {
            "block0": {
                "file": "0000-block0.safetensors",
                "pruner": "0000-block0.pruner.safetensors",
                "parameters": {"block0.fc.weight": {"shape": [3, 4], "kept": 5}},
            }
        },
        "files": {
            "0000-block0.safetensors": {"bytes": 10, "xxh3": HASH},
            "0000-block0.pruner.safetensors": {"bytes": 7, "xxh3": HASH},
        },
    }


def changed(path: str, value: object) -> bytes:
    found = values()
    *way, last = path.split("/")
    place: Any = found
    for key in way:
        place = place[key]
    place[last] = value
    return signed(json.dumps(found))


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = CheckpointManifest.model_validate_json(json.dumps(values()))

    found = parse_manifest(manifest_bytes(manifest))

    assert found == manifest
    assert found.method_state.distances == (0.1, 1 / 3)
    assert json.loads(manifest_bytes(manifest))["progress"]["step"] == 4


def test_no_flipped_bit_goes_unseen() -> None:
    data = manifest_bytes(CheckpointManifest.model_validate_json(json.dumps(values())))
    for place in range(len(data) - 1):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises(ValueError, match=r"has another hash than it says|is cut short, or no"):
            parse_manifest(bytes(flipped))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", 3, "format: "),
        ("progress/step", -1, "progress.step: "),
        ("progress/step", True, "progress.step: "),
        ("progress/loss_scale", float("nan"), "progress.loss_scale: |it: "),
        ("progress/first_bad", {"step": 1, "what": "a\x1b[2J"}, "progress.first_bad.what: "),
        ("method_state/distances", "x", "method_state.distances"),
        ("extra", 1, "extra: "),
        ("layers/block0/file", "../block0.safetensors", "layers.block0.file: "),
        ("layers/block0/file", "block0.safetensors\n", "layers.block0.file: "),
        ("layers/block0/file", "other.safetensors", "is among its files or those of its layers"),
        ("layers/block0/parameters/block0.fc.weight/shape", [-1], "shape.0: "),
        ("layers/block0/parameters/block0.fc.weight/kept", 10**4000, "kept: |it: "),
        ("files/..", {"bytes": 1, "xxh3": HASH}, "files.*"),
    ],
)
def test_a_forged_manifest_is_refused(path: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_manifest(changed(path, value))
    assert "\n" not in str(caught.value)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "manifest.json").symlink_to("real")
    with pytest.raises(MissingInputError, match="Too many levels of symbolic links"):
        read_manifest(tmp_path)

    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(AxsparseError):
        read_manifest(tmp_path)


def test_of_a_checkpoint_that_may_not_be_read_nothing_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 5)
    (tmp_path / "step-6.tmp").mkdir()
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.parent.name == "step-5":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)

    assert [path.name for path in unfinished(tmp_path)] == ["step-6.tmp"]
