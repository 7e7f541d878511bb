"""The documents of files: how they are found, cut and named, and those that cannot be used."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preparing import run, write_table

from axsparse.data import documents as module
from axsparse.data.chats import Chat
from axsparse.data.documents import (
    Completion,
    Content,
    DocumentSource,
    Piece,
    Reading,
    documents,
    find_sources,
    first_contents,
    read_json_lines,
    read_text,
)
from axsparse.data.preparation import Request
from axsparse.data.tables import _rows
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError


def source_of(path: Path) -> DocumentSource:
    [source], _ = find_sources([path], [], path / "out")
    return source


def pieces_of(path: Path, reading: Reading | None = None) -> list[Piece]:
    return list(documents(source_of(path), reading or Reading(), 0.0))


def texts(data: bytes, how: str, max_line: int = 100) -> list[str | None]:
    """The documents of a text file that are more than white space; None stands for an unusable
    one."""
    found = read_text(io.BytesIO(data), Reading(how, max_line=max_line))
    return [s.problem or s.text for s in found if s.problem or s.text.strip()]


# -- text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("none", ["= A =\nx\n \n\ny\n= B =\nz"]),
        ("blank-line", ["= A =\nx\n", "y\n= B =\nz"]),
        ("lines:2", ["= A =\nx\n", "y\n= B =\n", "z"]),
        ("regex:^= .* =$", ["= A =\nx\n \n\ny\n", "= B =\nz"]),
        ("regex:^y$", ["= A =\nx\n \n\n", "y\n= B =\nz"]),
    ],
)
def test_a_file_is_split_as_it_is_asked_for(how: str, expected: list[str]) -> None:
    text = b"\xef\xbb\xbf= A =\nx\n \n\ny\n= B =\nz"  # a byte-order mark is no text

    assert texts(text, how) == expected
    assert texts(text.replace(b"\n", b"\r\n"), how) == expected
    assert texts(text.replace(b"\n", b"\r"), how) == expected
    assert texts(b"a\rb\r\nc", "none") == ["a\nb\nc"]


def expected_documents(data: bytes, how: str, max_line: int) -> list[str]:
    """The usable documents of a file, found by a simple loop over its lines."""
    found = [b""]
    for line in data.splitlines(keepends=True):
        if how == "blank-line" and not line.strip():
            found.append(b"")
            continue
        if how == "regex:=" and "=" in line.decode(errors="replace"):
            found.append(b"")
        found[-1] += line
    usable = []
    for document in found:
        with contextlib.suppress(UnicodeDecodeError):
            longest = max((len(line) for line in document.split(b"\n")), default=0)
            if document.decode().strip() and longest <= max_line:
                usable.append(document.decode())
    return usable


@settings(max_examples=80, derandomize=True)
@given(
    fragments=st.lists(
        st.sampled_from([b"a", b"bc", b" ", b"\n", b"\n\n", b"= x\n", "é".encode(), b"\xff"]),
        max_size=60,
    ),
    how=st.sampled_from(["none", "blank-line", "regex:="]),
    sizes=st.tuples(st.integers(1, 50), st.integers(1, 20), st.integers(0, 5)),
)
def test_pieces_are_the_usable_documents_however_a_file_is_cut(
    fragments: list[bytes],
    how: str,
    sizes: tuple[int, int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("documents") / "a.txt"
    path.write_bytes(b"".join(fragments))

    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("STRETCH", "PIECE", "SLACK"), sizes, strict=True):
            patch.setattr(module, name, size)
        pieces = pieces_of(path, Reading(how, max_line=12))

    found, text, usable = [], "", True
    for piece in pieces:
        text, usable = text + piece.text, usable and piece.problem is None
        if piece.ends:
            # A document that is cut may turn out to be white space only after it has begun.
            found += [text] if usable and text.strip() else []
            text, usable = "", True
    assert text == ""
    assert found == expected_documents(path.read_bytes(), how, 12)


# -- JSONL ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["d.json", "D.JSON", "d.json.gz", "D.JSON.ZST", "D.JSONL.GZ", "d.jsonl"]
)
def test_json_files_are_read_as_datasets_reads_them(name: str, tmp_path: Path) -> None:
    records = [{"text": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"id": 1}]
    lines = "\n".join(map(json.dumps, records))
    indented = [json.dumps(records, indent=indent) for indent in (0, 1)]
    compress = {"gz": gzip.compress, "zst": by_zstd}.get(name.lower().rpartition(".")[2], bytes)
    for content in [lines, *indented]:
        data = ("\ufeff" + content).encode()
        (tmp_path / name).write_bytes(compress(data))

        found = pieces_of(tmp_path / name)

        assert [piece.text for piece in found] == ["a", "", ""]
        assert isinstance(found[1].content, Chat)
        unit = "line" if "jsonl" in name.lower() or compress is not bytes else "row"
        assert found[2].place.endswith(f"{name}, {unit} 3")
    (tmp_path / "bad.json").write_text("[")
    assert [piece.problem for piece in pieces_of(tmp_path / "bad.json")] == ["malformed JSON"]


@pytest.mark.parametrize(
    "files",
    [
        ["train/a.py", "train/names.txt", "test/b.py", "test/names.txt"],
        ["my_train_data.jsonl", "b.jsonl", "contest_a.jsonl", "a_latest.jsonl", "c_trains.json"],
        ["the dev set/a.jsonl", "the dev set/b.jsonl"],
        ["train/a_test.jsonl", "train/b.jsonl"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["arxiv-00000-of-00001.parquet", "books-00000-of-00001.parquet"],
        ["train/a.jsonl", "train/b.jsonl", "latest.jsonl", "evaluations/a.jsonl"],
        ["potty-training-in-three-days.txt", "the-acid-test-1968.txt"],
        ["weight-training.jsonl", "drug-test-reports.jsonl", "squad_dev_train.jsonl"],
        ["dev.to-posts.jsonl", "physics-test.jsonl", "docs/testing/a.txt", "docs/training/b.txt"],
    ],
)
def test_folders_of_texts_and_parts_of_a_split_are_no_splits(
    files: list[str], tmp_path: Path
) -> None:
    found, _ = find_sources([write(tmp_path, *files)], [], tmp_path / "out")

    assert len(found) == len(files)


@pytest.mark.parametrize(
    ("pattern", "splits", "told"),
    [
        ("{}_sft-00000-of-00001.parquet", "test train", "test_sft, train_sft; …train_sft-*"),
        ("{}-00000-of-00001.jsonl.gz", "train validation", "train, validation; …train-*"),
        ("{}/data-00000-of-00001.arrow", "test train", "test, train; …train"),
        ("{}.jsonl", "dev train", "dev, train; …train.*"),
        ("default/{}/0000.parquet", "test train", "test, train; …default/train"),
        ("{}_data.json", "training valid", "training, valid; …training_*"),
        ("sp4-{}.arrow", "test train", "test, train; …sp4-train.*"),
        ("{}/a.txt", "evaluation train", "evaluation, train; …train"),
        ("a_{}/train_data.jsonl", "test train", "test, train; …a_train/train_*"),
        ("{}_1.json", "training val", "training, val; …training_*"),
    ],
)
def test_a_folder_of_several_splits_is_refused_with_the_files_of_one(
    pattern: str, splits: str, told: str, tmp_path: Path
) -> None:
    root = write(tmp_path, *map(pattern.format, splits.split()))

    with pytest.raises(ConfigError) as caught:
        find_sources([root], [], root / "out")

    said = told.replace("…", f"name the files of one, such as {root}/")
    assert f"holds the splits {said}, and by" in str(caught.value)
    files = sorted(root.glob(told.partition("…")[2]))
    assert len(find_sources(files, [], root / "out")[0]) == 1


TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
SYSTEM = {"role": "system", "content": "s"}
OLDER = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
IDS = {"input_ids": [5, 6, 7, 8, 9]}
LACKS = "missing field (it has {}, and input_ids, messages, conversations, prompt with completio"
PACKED = "several documents packed into a record: name the data before it was packed"


class Unusable(str):
    """The beginning of the reason why a record cannot be used."""


RECORDS: list[tuple[Any, str | Content | Unusable]] = [
    ({"text": "a\nb", "id": 1}, "a\nb"),
    ('{"text": "é"}'.encode(), "é"),
    # Of several the first that can be read.
    ({"text": "a", **IDS, "labels": [-100, 6, 7, 8, 9]}, [-6, 6, 7, 8, 9]),
    ({"text": "a", "messages": TURNS}, Chat(TURNS)),
    ({"text": "a", "prompt": "x", "completion": "y"}, Completion("x", "y")),
    ({"text": "a", "messages": [], "conversations": "x", "input_ids": 5}, "a"),
    ({"text": "", "prompt": "x", "completion": "", "messages": []}, Unusable("empty")),
    ({"id": 1}, Unusable(LACKS.format("id"))),
    ({"prompt": "x", "chosen": "y"}, Unusable(LACKS.format("chosen, prompt"))),
    ({"instruction": "x", "output": "y"}, Unusable(LACKS.format("instruction, output"))),
    ({"text": None}, Unusable(LACKS.format("text: null"))),
    ({"prompt": "x", "completion": None}, Unusable(LACKS.format("completion: null, prompt"))),
    ({}, Unusable(LACKS.format("none"))),
    ("text", Unusable("no record with fields (str)")),
    ({"text": " \n"}, Unusable("empty")),
    (b'{"text": "x"', Unusable("malformed JSON")),
    (b"[" * 100_000, Unusable("malformed JSON")),
    (b'{"text": "\xe9"}', Unusable("not UTF-8")),
    ({"text": "\ud800"}, Unusable("half a character (a lone surrogate)")),
    ({"text": 5}, Unusable("text that cannot be read (int; give a text, a list of messages or")),
    ({"text": ["a"]}, Unusable("text that cannot be read (list of str; give a text")),
    ({"text": [1, "a"]}, Unusable("text that cannot be read (list of int and str; give a text")),
    ({"messages": "[]"}, Unusable("messages that cannot be read (str; give a list of mess")),
    ({"conversations": [{"from": ["human"], "value": "x"}]}, Unusable("a role that is no text")),
    ({"messages": [*TURNS, {"role": 5, "content": "x"}]}, Unusable("a role that is no text")),
    ({"messages": "hello", "text": None}, Unusable("messages that cannot be read")),
    ({"input_ids": "5"}, Unusable("input_ids that cannot be read")),
    ({"input_ids": [1.0]}, Unusable("input_ids that cannot be read (list of float; give a li")),
    ({"input_ids": []}, Unusable("empty")),
    # Token ids and messages, as TRL means them.
    ({"input_ids": [5, 6]}, [5, 6]),
    ({"text": [5, 6]}, [5, 6]),
    ({"messages": TURNS, "input_ids": [5]}, [5]),
    ({"conversations": OLDER, "id": 3}, Chat(TURNS)),
    ({"messages": OLDER, "tools": []}, Chat(TURNS, [])),
    ({"conversations": [{"from": "tool", "value": "x"}]}, Chat([{**TURNS[0], "role": "tool"}])),
    ({"conversations": OLDER, "system": "s"}, Chat([SYSTEM, *TURNS])),
    ({"messages": [SYSTEM, *TURNS], "system": "t"}, Chat([SYSTEM, *TURNS])),
    ({"messages": TURNS, "system": ["s"]}, Unusable("system that is no text")),
    ({"messages": TURNS, "functions": "f"}, Unusable("functions that are no list of schemas")),
    (
        {"prompt": TURNS[:1], "completion": TURNS[1:], "system": "s"},
        Chat([SYSTEM, *TURNS], prompt=2),
    ),
    ({"prompt": TURNS, "completion": [], "system": "s"}, Unusable("empty")),
    ({"prompt": "x", "completion": "y"}, Completion("x", "y")),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, Chat(TURNS, prompt=1)),
    ({"prompt": OLDER[:1], "completion": OLDER[1:]}, Chat(TURNS, prompt=1)),
    ({"prompt": "p", "messages": TURNS}, Chat(TURNS)),
    ({"prompt": "x", "completion": ""}, Unusable("empty")),
    ({"prompt": "x", "completion": TURNS}, Unusable("prompt and completion that are neither two")),
    ({"prompt": "\ud800", "completion": "x"}, Unusable("half a character")),
    ({"prompt": "x", "completion": "\ud800"}, Unusable("half a character")),
    # Padding is no text, and a token that a mask leaves out is no target.
    ({**IDS, "attention_mask": [0, 1, 1, 1, 0]}, [6, 7, 8]),
    ({**IDS, "completion_mask": [0, 0, 1, 1, 1]}, [-6, -7, 7, 8, 9]),
    ({**IDS, "assistant_masks": [0, 1, 0, 1, 0]}, [-6, 6, -8, 8, -10]),
    ({**IDS, "labels": [-100, 6, 7, 8, 9]}, [-6, 6, 7, 8, 9]),
    (
        {
            **IDS,
            "labels": [-100, 6, 7, 8, -100],
            "attention_mask": [1, 1, 1, 1, 0],
            "completion_mask": [0, 0, 1, 1, 1],
            "assistant_masks": [1, 1, 1, 0, 1],
        },
        [-6, -7, 7, -9],
    ),
    ({**IDS, "labels": [-100, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 1, 0]}, [-6, 6, 7, 8, 9]),
    ({**IDS, "loss_mask": [0, 1, 1, 1, 1]}, Unusable("loss_mask with zeros")),
    ({**IDS, "attention_mask": [0] * 5}, Unusable("empty")),
    ({**IDS, "completion_mask": [1]}, Unusable("completion_mask that do not fit the ids")),
    (
        {**IDS, "attention_mask": [1, None, *[1] * (len(IDS["input_ids"]) - 2)]},
        Unusable("attention_mask with a null in place of a number"),
    ),
    ({**IDS, "labels": [1] * 5}, Unusable("labels that do not fit the ids")),
    ({**IDS, "position_ids": [0, 1, 2, 3, 4], "seq_lengths": [5]}, [5, 6, 7, 8, 9]),
    ({**IDS, "position_ids": [0, 1, 0, 1, 2]}, Unusable(PACKED)),
    ({**IDS, "position_ids": [1, 1, 0, 1, 2], "attention_mask": [0, 0, 1, 1, 1]}, [7, 8, 9]),
    ({**IDS, "position_ids": [1, 0, 1, 0, 1], "attention_mask": [0, 1, 1, 1, 1]}, Unusable(PACKED)),
    ({**IDS, "seq_lengths": [2, 3]}, Unusable(PACKED)),
]


def test_each_record_is_its_document_or_says_why_it_is_none() -> None:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one, _ in RECORDS]
    data = b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n \n"

    found = list(read_json_lines(io.BytesIO(data), Reading()))

    assert [piece.line for piece in found] == [*range(1, len(RECORDS) + 1)]
    assert all(piece.ends for piece in found)
    for piece, (record, expected) in zip(found, RECORDS, strict=True):
        if isinstance(expected, Unusable):
            assert str(piece.problem).startswith(expected), record
        else:
            assert (piece.content or piece.text, piece.problem) == (expected, None), record
    record = b'{"input_ids": [1], "text": "a", "b": "x"}'
    (named,) = read_json_lines(io.BytesIO(record), Reading(jsonl_field="b"))
    assert (named.text, named.choice) == ("x", "")
    (taken,) = read_json_lines(io.BytesIO(record), Reading())
    assert (taken.content, taken.choice) == ([1], "input_ids taken, text left out")


def test_empty_lists_are_no_chats_and_ask_for_no_template(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text('{"input_ids": []}\n{"messages": []}\n')

    contents = first_contents([source_of(path)], Reading())

    assert not any(isinstance(content, Chat) for content in contents)


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a"}\n',
        '[\n {"text": "a"}]',
        '{"text":\n"b"}\n{"text": "a"}',
        '\n{"text": "a"}\n  \n',
    ],
)
def test_json_is_a_list_or_a_record_a_line_and_a_link_says_so(content: str, tmp_path: Path) -> None:
    """As in the cache of the hub; a link without an ending has that of its file."""
    for file, link in (("blob", "a.json"), ("b.json", "link")):
        (tmp_path / file).write_text(content)
        (tmp_path / link).symlink_to(file)

        found = pieces_of(tmp_path / link)

        assert [piece.text for piece in found if piece.problem is None] == ["a"]


def test_a_huge_line_is_passed_over_and_the_next_record_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE", 7)
    data = b'{"text": "' + b"x" * 60 + b'"}\n{"text": "y"}\n' + b"z" * 50

    found = read_json_lines(io.BytesIO(data), Reading(max_line=30))

    assert [(s.line, s.text, s.problem) for s in found] == [
        *((1, "", "huge line"), (2, "y", None), (3, "", "huge line"))
    ]


# -- tables ---------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"text": "one", "other": 1},
    {"text": None, "other": 2},
    {"text": " ", "other": 3},
    {"text": "four\nlines", "other": 4},
]


@pytest.mark.parametrize(
    ("ending", "kind"), [("parquet", ""), ("arrow", "stream"), ("arrow", "file")]
)
def test_each_row_is_a_document_and_named_by_its_row(
    ending: str, kind: str, tmp_path: Path
) -> None:
    path = write_table(tmp_path / f"a.{ending}", ROWS, batch=2, kind=kind)

    found = pieces_of(path)

    kinds = [piece.problem and piece.problem.partition(" (")[0] for piece in found]
    assert [piece.text for piece in found] == ["one", "", " ", "four\nlines"]
    assert kinds == [None, "missing field", "empty", None]
    assert "(it has text: null, and input_ids" in str(found[1].problem)
    assert [piece.place for piece in found] == [f"{path}, row {row}" for row in (1, 2, 3, 4)]
    [missing] = pieces_of(path, Reading(jsonl_field="words"))
    assert missing.place == f"{path}, row 1"
    assert str(missing.problem).startswith("missing field (it has other, text, and words, input_i")
    [missing] = pieces_of(path, Reading(jsonl_field="messages"))
    assert str(missing.problem).endswith("prompt with completion are read; --jsonl-field adds one)")


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

    found = pieces_of(write_table(tmp_path / "a.arrow", pyarrow.table({"text": texts.view(kind)})))

    assert [piece.text for piece in found] == ["one", "", "drei é"]
    assert (found[1].place, found[1].problem) == (f"{tmp_path}/a.arrow, row 2", "not UTF-8")


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"]
)
@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_every_type_of_text_in_a_table_is_text(kind: str, ending: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'axsparse[test]'")
    texts = pyarrow.array(["one", "drei é", "one"])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)

    found = pieces_of(write_table(tmp_path / f"a.{ending}", pyarrow.table({"text": column})))

    assert [piece.text for piece in found] == ["one", "drei é", "one"]


def test_keys_that_other_messages_have_are_not_none_in_a_table(tmp_path: Path) -> None:
    """As TRL reads tables."""
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": [2]}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": "b"},
    ]
    path = write_table(tmp_path / "a.parquet", [{"messages": messages}, {"messages": []}])

    chat, _ = (piece.content for piece in pieces_of(path))

    assert isinstance(chat, Chat)
    assert chat.messages == messages


@pytest.mark.parametrize("is_known", [True, False], ids=["type", "texts"])
def test_json_in_a_table_is_read_as_datasets_reads_it(is_known: bool) -> None:
    """With null where it says so, unlike a struct's keys, which another row may have brought. Also
    by a pyarrow before 19, which knows the name of the type alone."""
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'axsparse[test]'")

    def json_field(name: str) -> Any:
        named = {"ARROW:extension:name": "arrow.json"}
        return pyarrow.field(name, pyarrow.string(), metadata=named)

    call = pyarrow.struct([pyarrow.field("name", pyarrow.string()), json_field("arguments")])
    columns = {
        json_field("whole"): ['{"a":[1,null]}', None],
        pyarrow.field("messages", pyarrow.list_(json_field("item"))): [['{"role":"user"}'], []],
        pyarrow.field("calls", pyarrow.list_(call)): [
            [{"name": "f", "arguments": '{"n":1,"unit":null}'}, None],
            [{"name": "g", "arguments": None}],
        ],
        pyarrow.field("text", pyarrow.string()): ['{"a":1}', None],
        pyarrow.field("map", pyarrow.map_(pyarrow.string(), pyarrow.int8())): [[("k", None)], None],
    }
    arrays = [pyarrow.array(values, field.type) for field, values in columns.items()]
    batch = pyarrow.record_batch(arrays, schema=pyarrow.schema([*columns]))
    if is_known:
        file = io.BytesIO(batch.schema.serialize().to_pybytes() + batch.serialize().to_pybytes())
        batch = pyarrow.ipc.open_stream(file).read_next_batch()

    assert [*_rows(pyarrow, iter([batch]))] == [
        {
            "whole": {"a": [1, None]},
            "messages": [{"role": "user"}],
            "calls": [{"name": "f", "arguments": {"n": 1, "unit": None}}, None],
            "text": b'{"a":1}',
            "map": [("k", None)],
        },
        {"whole": None, "messages": [], "calls": [{"name": "g"}], "text": None, "map": None},
    ]


def test_tables_need_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError) as caught:
        run(Request((path,), tmp_path / "out"))

    assert str(caught.value) == (
        "files of Arrow, Parquet and .zst need pyarrow, which is not installed; "
        "pip install 'axsparse[arrow]'"
    )


# -- files ----------------------------------------------------------------------------------


def by_zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'axsparse[arrow]'")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("zst", by_zstd)])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"text": "é"}\n'), ("a.txt", "é")])
def test_a_compressed_file_is_what_it_was_before(
    name: str, text: str, ending: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.{ending}"
    path.write_bytes(compress(text.encode()))

    assert [piece.text for piece in pieces_of(path)] == ["é"]
    path.write_bytes(compress(text.encode() * 9)[:-9])
    assert [piece.problem for piece in pieces_of(path)][-1] == "unreadable"
    path.write_bytes(b"no archive")
    [piece] = pieces_of(path)
    assert piece.problem == "unreadable"
    assert re.fullmatch(rf"{re.escape(str(path))} \(\w.+\)", piece.place), piece.place


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((f"a.{name}", "no format that is read; write it as JSONL") for name in ("csv", "tsv.gz")),
        *((f"a.jsonl.{ending}", "an archive; unpack it") for ending in ("bz2", "xz", "lz4", "zip")),
    ],
)
def test_formats_that_are_not_read_are_no_texts(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"a,b") if name.endswith("gz") else b"a,b")

    [piece] = pieces_of(tmp_path / name)
    assert piece.problem == "unreadable"
    assert piece.place.startswith(f"{tmp_path / name} ({why}")


@pytest.mark.parametrize("name", ["a", "a.jsonl"])
def test_a_file_that_changes_meanwhile_is_refused_and_one_that_disappears_is_unreadable(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text("before")
    source = source_of(path)
    path.write_text("behind")
    os.utime(path, ns=(0, 0))

    with pytest.raises(DataError, match="changed while it was being prepared; leave it alone"):
        list(documents(source, Reading(), 0.0))
    path.unlink()
    assert [(p.problem, p.ends) for p in documents(source, Reading(), 0.0)] == [
        ("unreadable", True)
    ]


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_files_below_a_folder_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    root = write(tmp_path, "b", "a/z", "a/b/c", "a.txt", ".hidden", ".git/config", "out/train")
    write(tmp_path, "a/of.run/run.lock")
    (root / "loop").symlink_to(root, target_is_directory=True)

    found, _ = find_sources([root], [], root / "out", root / "a" / "of.run")

    names = [source.name.removeprefix(f"{root}/") for source in found]
    assert names == ["a.txt", "a/b/c", "a/z", "b"]
    assert [source.size for source in found] == [len(name) for name in names]


def test_linked_folders_are_read_once_and_without_end(tmp_path: Path) -> None:
    root = write(tmp_path / "root", "a/x", ".blobs/y").absolute()
    other = write(tmp_path / "other", "sub/z")
    links = {"b": other, "a/c": root / ".blobs", "A": root / "a", "up": tmp_path, "d": other}
    for name, folder in links.items():
        (root / name).symlink_to(folder)
    (other / "sub" / "back").symlink_to(other)
    (other / "home").symlink_to(root / "a")

    found, left_out = find_sources([root], [], root / "out")

    names = [source.name.removeprefix(f"{root}/") for source in found]
    assert (names, left_out) == (["a/c/y", "a/x", "b/sub/z"], [])


@pytest.mark.parametrize(
    "ending", ["parquet", "jsonl.gz", "jsonl.zst", "jsonl.zip", "arrow", "csv"]
)
def test_the_card_and_the_scripts_of_a_data_set_are_no_documents(
    ending: str, tmp_path: Path
) -> None:
    data, notes = f"data/train-00000-of-00001.{ending}", "more/notes.txt"
    saved = ("data/dataset_info.json", "data/state.json", "dataset_dict.json")
    root = write(tmp_path, "README.md", "LICENSE", "load.py", data, notes, *saved)

    found, left_out = find_sources([root], [], root / "out")

    names = {source.name.removeprefix(f"{root}/") for source in found}
    why = "no data (next to files of data; name it to take it)"
    if ending == "csv":
        assert left_out == []
        assert {"README.md", "load.py"} < names
    else:
        is_saved = ending == "arrow"
        assert names == {data, notes, *(() if is_saved else saved)}
        others = ("LICENSE", "README.md", *(saved if is_saved else ()), "load.py")
        assert sorted(left_out) == [(f"{root}/{name}", why) for name in others]


def test_caches_next_to_a_saved_data_set_are_left_out(tmp_path: Path) -> None:
    root = write(tmp_path, "train/data-0.arrow", "train/cache-1.arrow", "other/cache-2.arrow")
    (root / "train" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (root / "other" / "state.json").write_text('{"arrow": 1}')

    found, left_out = find_sources([root], [], root / "out")

    names = [source.name.removeprefix(f"{root}/") for source in found]
    assert names == ["other/cache-2.arrow", "train/data-0.arrow"]
    why = "a cache, which state.json does not name (name it to take it)"
    assert (f"{root}/train/cache-1.arrow", why) in left_out


def test_a_file_counts_once_and_as_validation_data_if_it_is_named_so(tmp_path: Path) -> None:
    root = write(tmp_path, "a", "b")
    (root / "link").symlink_to(root / "a")

    found, _ = find_sources([root, root / "a"], [root / "b"], root / "out")

    assert sorted((Path(s.path).name, s.validation) for s in found) == [("a", False), ("b", True)]


def test_what_is_no_file_is_counted_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    root = write(tmp_path, "a")
    (root / "lost").symlink_to("/nowhere")
    os.mkfifo(root / "pipe")

    [_], left_out = find_sources([root], [], root / "out")
    assert left_out == [(f"{root}/lost", "unreadable"), (f"{root}/pipe", "unreadable")]
    assert find_sources([root / "a"], [], root / "out")[1] == []
    for name in ("lost", "pipe", "missing"):
        with pytest.raises(MissingInputError, match=f"{name} is neither a file nor a folder"):
            find_sources([root / name], [], root / "out")
