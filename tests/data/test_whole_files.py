"""Files that appear complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
from pathlib import Path

import pytest

from axsparse.data.whole_files import digest_of, locked, new_file, remove_unfinished
from axsparse.runtime.errors import OutputError


def test_a_file_has_its_name_only_once_it_is_complete(tmp_path: Path) -> None:
    with new_file(tmp_path / "a") as file:
        file.write(b"new")
        assert not (tmp_path / "a").exists()

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "a") as file:
        file.write(b"new" * (1 // 0))

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught, new_file(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert str(caught.value) == (
        f"--out: {tmp_path}/a cannot be written (No space left on device); free the disk, or "
        "choose another place"
    )


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    for name in ("a.unfinished-12", "b.tokens.unfinished-3", "c"):
        (tmp_path / name).write_text("")

    remove_unfinished(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_digest_is_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1_000_000)
    (tmp_path / "b").write_bytes(b"abc" * 999_999 + b"abd")

    expected = hashlib.blake2b(b"abc" * 1_000_000, digest_size=16).hexdigest()
    assert digest_of(tmp_path / "a") == expected
    assert digest_of(tmp_path / "b") != digest_of(tmp_path / "a")


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with locked(tmp_path) as is_locked:
        assert is_locked
    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path) as is_locked:
        assert not is_locked
