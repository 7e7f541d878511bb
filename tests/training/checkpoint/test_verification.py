"""A checkpoint that is not as it was written is found out, file by file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.resuming import ran
from support.runs import tiny_config

from axsparse.runtime.errors import DataError, MissingInputError
from axsparse.training.checkpoint.verification import is_whole, open_checkpoint, verify


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = tiny_config(train={"steps": 1}, checkpoint={"every": 1})
    ran((1, 1), config, tmp_path)
    return tmp_path / "checkpoints" / "step-1"


def test_what_is_as_it_was_written_is_whole(saved: Path) -> None:
    verify(open_checkpoint(saved))

    assert is_whole(saved)


def test_a_byte_that_has_changed_is_found_in_every_file(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert len(checkpoint.manifest.files) > 2
    for name in checkpoint.manifest.files:
        contents = (saved / name).read_bytes()
        (saved / name).write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))

        with pytest.raises(DataError, match=f"{name} has another hash than its manifest says"):
            verify(checkpoint)
        verify(checkpoint, set(checkpoint.manifest.files) - {name})
        assert not is_whole(saved)
        (saved / name).write_bytes(contents)


def test_files_of_another_size_or_none_are_told(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    name = next(iter(checkpoint.manifest.files))
    with (saved / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=rf"{name} has \d+ bytes, its manifest says \d+; resume"):
        verify(checkpoint)

    (saved / name).unlink()

    with pytest.raises(MissingInputError, match=rf"{name} cannot be read \(No such file"):
        verify(checkpoint)
    assert not is_whole(saved)
