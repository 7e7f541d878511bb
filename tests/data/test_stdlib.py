"""The source files of the standard library as data."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import pytest

from axsparse.data.stdlib import source_tokens, stdlib_dataset
from axsparse.data.token_file import Split
from axsparse.runtime.errors import DataError

# The CRC of their paths makes all of these training files.
FILES = {"a.py": b"x = 1\n", "b.py": b"", "c/a.py": "é = 2\n".encode(), "c.py": b"pass"}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_file_is_validation_iff_ten_divides_the_crc_of_its_path(tmp_path: Path) -> None:
    files = {f"package/module{number}.py": b"%d" % number for number in range(200)}
    names = [name for name in files if zlib.crc32(name.encode()) % 10 == 0]

    tokens, _ = source_tokens(write(tmp_path, files), "validation")

    assert tokens.tobytes() == b"".join(files[name] + b"\0" for name in sorted(names))


def test_only_the_librarys_own_sources_count(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    before = source_tokens(tmp_path, "train")
    others = ("site-packages", "dist-packages", "lib-dynload", "test", "c/tests", "c/idle_test")
    for folder in (*others, "__pycache__"):
        # Ten files, so that some of them would be training files.
        write(tmp_path, {f"{folder}/sub/{number}.py": b"other" for number in range(10)})
    write(tmp_path, {"c/notes.txt": b"other", "c/x.pyc": b"other"})
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)

    after = source_tokens(tmp_path, "train")

    assert after[0].tobytes() == before[0].tobytes()
    assert after[1] == before[1]


@pytest.mark.parametrize(
    ("name", "content", "removed"),
    [("c.py", b"Pass", ""), ("d.py", b"", ""), ("bc.py", b"pass", "c.py"), ("c.py", b"", "")],
    ids=["a letter", "an empty file more", "a new name", "nothing left"],
)
def test_the_fingerprint_covers_paths_and_contents(
    tmp_path: Path, name: str, content: bytes, removed: str
) -> None:
    original = source_tokens(write(tmp_path / "original", FILES), "train")[1]
    copy = source_tokens(write(tmp_path / "copy", FILES), "train")[1]
    files = {name: content for name, content in FILES.items() if name != removed}
    changed = source_tokens(write(tmp_path / "changed", files | {name: content}), "train")[1]

    assert copy == original
    assert changed != original


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The refusal is simulated, since root may read every folder.
    def scandir(folder: str) -> object:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
        source_tokens(tmp_path, "train")


def test_the_running_pythons_library_is_there_and_its_two_splits_share_no_file() -> None:
    documents: list[set[bytes]] = []
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        tokens, fingerprint = source_tokens(Path(sysconfig.get_path("stdlib")), split)
        dataset = stdlib_dataset(split, sequence_length=128)
        assert (dataset.fingerprint, dataset.name) == (fingerprint, f"stdlib {split}")
        assert dataset.vocab_size == 256
        assert len(dataset) == (tokens.size - 1) // 128 > 1000
        documents.append({*tokens.tobytes().split(b"\0")})
        assert any(b"\ndef " in document for document in documents[-1])

    assert documents[0] & documents[1] <= {b""}
