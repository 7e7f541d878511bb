"""Rows of Parquet and Arrow as documents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.formats import write_table
from support.preparing import run

from axsparse.data.documents import Piece, Reading, documents, find_sources
from axsparse.data.preparation import Request
from axsparse.runtime.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [
    {"text": "one", "other": 1},
    {"text": None, "other": 2},
    {"text": " ", "other": 3},
    {"text": "four\nlines", "other": 4},
]


def pieces_of(path: Path, field: str = "text") -> list[Piece]:
    reading = Reading(jsonl_field=field)
    sources, _ = find_sources([path], [], path.parent / "out", reading)
    return [piece for source in sources for piece in documents(source, reading, 0.0)]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_each_row_is_a_document_and_named_by_its_row(ending: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"a.{ending}", ROWS, batch=2)

    found = pieces_of(path)

    kinds = [piece.problem and piece.problem.partition(" (")[0] for piece in found]
    assert [piece.text for piece in found] == ["one", "", " ", "four\nlines"]
    assert kinds == [None, "missing field", "empty", None]
    assert [piece.place for piece in found] == [f"{path}, row {row}" for row in (1, 2, 3, 4)]


def test_arrow_files_with_a_table_of_contents_are_read_as_streams_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'axsparse[test]'")
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=2)

    texts = [piece.text for piece in pieces_of(tmp_path / "a.arrow")]
    assert texts == ["one", "", " ", "four\nlines"]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("size", [0, 7, 200, -40, -1])
def test_a_table_that_was_cut_is_unreadable(ending: str, size: int, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"a.{ending}", ROWS * 50, batch=20)
    whole = path.read_bytes()
    path.write_bytes(whole[: size if size >= 0 else len(whole) + size])

    problems = [piece.problem for piece in pieces_of(path)]

    # The last bytes of an Arrow stream only say that it ends.
    assert problems[-1] == "unreadable" or (ending == "arrow" and size in (-1, 0))


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_text_that_is_not_utf8_leaves_the_others(kind: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'axsparse[test]'")
    texts = pyarrow.array([b"one", b"caf\xe9", "drei é".encode()]).cast("large_binary")
    texts = texts.cast("binary") if kind == "string" else texts
    table = pyarrow.table({"text": texts.view(kind)})
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)

    found = pieces_of(tmp_path / "a.arrow")

    assert [piece.text for piece in found] == ["one", "", "drei é"]
    assert (found[1].place, found[1].problem) == (f"{tmp_path}/a.arrow, row 2", "not UTF-8")


def test_a_table_without_the_column_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", ROWS)

    assert [(p.place, p.problem) for p in pieces_of(path, "words")] == [
        (
            f"{path}, row 1",
            "missing field (it has other, text, and words, messages, conversations, input_ids, "
            "prompt with completion are read)",
        )
    ]


def test_tables_need_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError) as caught:
        run(Request((path,), tmp_path / "out"))

    assert str(caught.value) == (
        "files of Arrow and Parquet need pyarrow, which is not installed; "
        "pip install 'axsparse[arrow]'"
    )


def test_rows_that_cannot_be_used_are_told_with_file_and_row(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", [{"input_ids": [1, 256]}, {"input_ids": [2]}])

    sidecar, screen = run(Request((path,), tmp_path / "out"))

    assert f"{path}, row 1: ids beyond the vocabulary" in screen
    assert (sidecar.train.documents, sidecar.train.tokens) == (1, 2)
    with pytest.raises(DataError, match=r"1 missing field; the first: \S+a\.parquet, row 1: miss"):
        run(Request((write_table(path, [{"words": "a"}]),), tmp_path / "other"))
