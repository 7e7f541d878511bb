"""Files and folders appear complete or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from axsparse.runtime.errors import OutputError, writing
from axsparse.runtime.files import atomic
from axsparse.runtime.files.atomic import UNFINISHED, new_path, remove_unfinished, write_new


@pytest.mark.parametrize("is_folder", [False, True])
def test_it_gets_its_name_at_the_end_and_replaces_what_had_it(
    is_folder: bool, tmp_path: Path
) -> None:
    path = tmp_path / "new"
    for content in ("one", "two"):
        with new_path(path) as unfinished:
            assert UNFINISHED in unfinished.name and unfinished.parent == path.parent
            assert path.exists() == (content == "two")
            if is_folder:
                unfinished.mkdir()
                (unfinished / "inner").write_text(content)
            else:
                unfinished.write_text(content)

    assert (path / "inner" if is_folder else path).read_text() == "two"
    assert [child.name for child in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_breaks_leaves_what_was_there(is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "new"
    path.write_text("old")

    def broken() -> None:
        with new_path(path) as unfinished:
            if is_folder:
                unfinished.mkdir()
            (unfinished / "inner" if is_folder else unfinished).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()

    assert path.read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_cannot_be_replaced_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new"
    path.mkdir()
    (path / "inner").write_text("old")
    rename = Path.rename

    def reject(self: Path, target: Path) -> Path:
        if target == path and not self.name.endswith(".before"):
            raise OSError("full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", reject)

    with pytest.raises(OSError, match="full"), new_path(path) as unfinished:
        unfinished.mkdir()

    assert (path / "inner").read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(("killed_at", "left"), [("rename", "old"), ("_remove", "new")])
def test_of_a_folder_that_was_being_replaced_one_version_is_left(
    killed_at: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new"
    path.mkdir()
    (path / "inner").write_text("old")
    rename = Path.rename
    if not (child := os.fork()):
        try:
            if killed_at == "_remove":
                monkeypatch.setattr(atomic, "_remove", lambda _: os._exit(0))
            else:
                monkeypatch.setattr(
                    Path, "rename", lambda a, b: os._exit(0) if b == path else rename(a, b)
                )
            with new_path(path) as unfinished:
                unfinished.mkdir()
                (unfinished / "inner").write_text("new")
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

    remove_unfinished(path)

    assert (path / "inner").read_text() == left
    assert [one.name for one in tmp_path.iterdir()] == ["new"]


def test_contents_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new"
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.exists()))

    with new_path(path) as unfinished:
        unfinished.write_text("all")

    assert synced == [False, True]


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_new_file_is_on_the_disk_whole(
    is_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path, synced = tmp_path / "source", tmp_path / "new", list[bytes]()
    source.write_bytes(b"content")
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))

    write_new(path, source if is_copy else b"content")

    assert (synced, path.read_bytes()) == ([b"content"], b"content")
    with pytest.raises(FileExistsError):
        write_new(path, b"other")
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize(
    "line",
    [
        "a/out: cannot be written (No space left on device); free the disk, or choose another "
        "place",
        "--out: ids cannot be written (No space left on device); free the disk, or choose another "
        "place",
        "--out: order.json cannot be written (No space left on device); free the disk",
    ],
)
def test_to_free_a_disk_is_advised_where_that_can_help(line: str) -> None:
    what, _, advice = line.partition(" cannot be written (No space left on device); ")
    with pytest.raises(OutputError) as caught, writing(what, advice):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value) == line
    with (
        pytest.raises(OutputError, match=r"\(File exists\); choose another place$"),
        writing(what, "free the disk, or choose another place"),
    ):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
