"""The whole preparation: its results do not depend on the parts or the workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preparing import LINE, make_library, outputs, requested, run

from axsparse.data.prepare import text_sources as prepare_sources
from axsparse.data.prepare.documents import Reading
from axsparse.data.prepare.request import Request
from axsparse.data.token_file import Split, read_sidecar, stored, token_path
from axsparse.runtime.errors import ConfigError, DataError, OutputError


def ids_of(folder: Path, split: Split = "train") -> Any:
    return np.fromfile(token_path(folder, split), stored(read_sidecar(folder, "").dtype))


def documents_of(folder: Path, split: Split = "train") -> list[str]:
    """The documents that the tokens in a folder decode to."""
    sidecar = read_sidecar(folder, "")
    ids = ids_of(folder, split)
    assert ids[-1] == sidecar.separator
    ends = np.flatnonzero(ids == sidecar.separator)
    documents = [part[part != sidecar.separator] for part in np.split(ids, ends)[:-1]]
    if sidecar.tokenizer.kind == "bytes":
        return [document.astype(np.uint8).tobytes().decode() for document in documents]
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(list(document)) for document in documents]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return make_library(tmp_path / "library")


# -- what comes out -------------------------------------------------------------------------


def expected_documents(data: bytes, how: str, max_line: int) -> list[bytes]:
    """The usable documents of a file, found by a simple loop over its lines."""
    documents = [b""]
    for line in data.removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True) if data else []:
        if how == "blank-line" and not line.strip():
            documents.append(b"")
            continue
        if how == "regex:=" and "=" in line.decode(errors="replace"):
            documents.append(b"")
        documents[-1] += line
    usable = []
    for document in documents:
        with contextlib.suppress(UnicodeDecodeError):
            longest = max((len(line) for line in document.split(b"\n")), default=0)
            if document.decode().strip() and longest <= max_line:
                usable.append(document)
    return usable


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    pieces=st.lists(
        st.sampled_from([b"a", b"bc", b" ", b"\n", b"\n\n", b"= x\n", "é".encode(), b"\xff"]),
        max_size=60,
    ),
    how=st.sampled_from(["none", "blank-line", "regex:="]),
    part_bytes=st.integers(1, 50),
    window=st.integers(4, 30),
)
def test_tokens_decode_to_the_usable_documents_however_the_file_is_cut(
    pieces: list[bytes],
    how: str,
    part_bytes: int,
    window: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    data = b"".join(pieces)
    (folder / "a.txt").write_bytes(data)
    (folder / "b.txt").write_bytes(b"last")
    # Only where a file is one document may a long line be cut.
    max_line = 12 if how == "none" else 1000
    request = Request(
        inputs=(folder / "a.txt", folder / "b.txt"),
        out=folder / "out",
        reading=Reading(how, max_line=max_line),
        part_bytes=part_bytes,
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_sources, "WINDOW", window)
        patch.setattr(os, "fsync", lambda _: None)  # thousands of them take minutes
        sidecar, _ = run(request)

    expected = [*expected_documents(data, how, max_line), b"last"]
    assert documents_of(request.out) == [document.decode() for document in expected]
    assert sidecar.train.documents == len(expected)
    assert sidecar.train.tokens == sum(map(len, expected)) + len(expected)


def test_lines_that_stand_for_a_document_lose_nothing_whatever_the_parts(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a").write_text(text)
    request = Request((tmp_path / "a",), tmp_path / "o", reading=Reading("lines:7"), part_bytes=90)

    run(request)

    documents = documents_of(request.out)
    assert "".join(documents) == text
    assert {document.count("\n") for document in documents[:1]} == {7}
    assert max(document.count("\n") for document in documents) == 7


@pytest.mark.parametrize("bpe", [None, 300])
def test_the_number_of_workers_changes_no_byte(
    library: Path, tmp_path: Path, bpe: int | None
) -> None:
    run(requested(library, tmp_path / "1", train_bpe=bpe), workers=1)
    run(requested(library, tmp_path / "4", train_bpe=bpe), workers=4)

    assert outputs(tmp_path / "1") == outputs(tmp_path / "4")
    assert set(outputs(tmp_path / "1")) == {
        *("train.tokens", "validation.tokens", "tokens.json"),
        *(() if bpe is None else ("tokenizer.json",)),
    }


def test_byte_pairs_are_those_of_the_text_in_one_piece(library: Path, tmp_path: Path) -> None:
    import tokenizers

    # Without a document boundary near, the held-out documents may depend on the cuts.
    whole = {"validation_fraction": 0.0}
    run(requested(library, tmp_path / "cut", train_bpe=300, part_bytes=500, **whole))
    cut = documents_of(tmp_path / "cut")
    run(requested(library, tmp_path / "bytes", **whole))

    assert cut == documents_of(tmp_path / "bytes")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "cut" / "tokenizer.json"))
    together = [id_ for text in cut for id_ in (*tokenizer.encode(text).ids, 0)]
    assert ids_of(tmp_path / "cut").tolist() == together
    assert ids_of(tmp_path / "cut").dtype == np.uint16


def test_a_tokenizer_that_is_given_makes_the_tokens(library: Path, tmp_path: Path) -> None:
    run(requested(library, tmp_path / "trained", train_bpe=300))
    given = tmp_path / "trained" / "tokenizer.json"

    sidecar, _ = run(requested(library, tmp_path / "given", tokenizer=given))

    assert (sidecar.tokenizer.kind, sidecar.vocab_size, sidecar.separator) == ("file", 300, 0)
    for name in ("train.tokens", "validation.tokens", "tokenizer.json"):
        assert outputs(tmp_path / "given")[name] == outputs(tmp_path / "trained")[name]


def test_a_fraction_of_the_documents_is_held_out_and_equal_ones_fall_alike(
    tmp_path: Path,
) -> None:
    texts = [f"document {number}\n" for number in range(1000)] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))

    sidecar, _ = run(Request((tmp_path / "a.jsonl",), tmp_path / "o", validation_fraction=0.2))

    training, held_out = (documents_of(tmp_path / "o", split) for split in ("train", "validation"))
    assert sorted(training + held_out) == sorted(texts)
    assert not set(training) & set(held_out)
    assert sidecar.validation is not None
    assert sidecar.validation.documents == len(held_out) == pytest.approx(400, abs=60)


def test_validation_files_are_no_training_files(library: Path, tmp_path: Path) -> None:
    named = library / "more" / "3.txt"

    sidecar, _ = run(
        requested(library, tmp_path / "o", validation=(named,), validation_fraction=0.0)
    )

    assert documents_of(tmp_path / "o", "validation") == [LINE * 3]
    assert LINE * 3 not in documents_of(tmp_path / "o")
    assert sidecar.validation is not None


def test_what_is_left_out_is_counted_on_the_screen_and_in_the_sidecar(
    library: Path, tmp_path: Path
) -> None:
    sidecar, screen = run(requested(library, tmp_path / "o"))

    assert sidecar.sources.left_out == {"unreadable": 1, "not UTF-8": 1, "empty": 1}
    assert sidecar.sources.examples == (
        f"{library}/lost.txt: unreadable",
        f"{library}/latin.txt, byte 0: not UTF-8",
        f"{library}/more/0.txt, byte 0: empty",
    )
    assert "left out 3 documents: 1 unreadable, 1 not UTF-8, 1 empty\n" in screen
    for example in sidecar.sources.examples:
        assert f"  {example}\n" in screen
    assert re.search(r"^train: 6\d\d documents, \S+k tokens$", screen, re.MULTILINE)


def test_many_that_are_left_out_are_not_all_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 30 + '{"text": "x"}')

    sidecar, screen = run(Request((tmp_path / "a.jsonl",), tmp_path / "o", part_bytes=8))

    assert sidecar.sources.left_out == {"malformed JSON": 30}
    assert len(sidecar.sources.examples) == 20
    assert screen.count(": malformed JSON\n") == 10
    assert "  and 20 more; tokens.json names the first 20\n" in screen


def test_a_document_across_parts_with_a_bad_byte_is_left_out_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"word " * 100 + b"\xff" + b" word" * 100)
    (tmp_path / "b").write_bytes(b"good")

    sidecar, _ = run(Request((tmp_path / "a", tmp_path / "b"), tmp_path / "o", part_bytes=64))

    assert documents_of(tmp_path / "o") == ["good"]
    assert sidecar.sources.examples == (f"{tmp_path}/a, byte 0: not UTF-8",)


def words_of(folder: Path) -> set[str]:
    """The words of a learnt vocabulary that are longer than one character."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {word for word in vocabulary if len(word) == 2}


PAIRS = [f"{a}{b}" for a in "abcdefgh" for b in "stuvwxyz"]


def test_a_vocabulary_is_learnt_from_the_training_documents_alone(tmp_path: Path) -> None:
    records = [json.dumps({"text": f"{pair} " * 50}) for pair in PAIRS]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    (tmp_path / "named.txt").write_text("mn " * 500)

    run(Request((tmp_path / "a.jsonl",), tmp_path / "o", validation_fraction=0.3, train_bpe=500))
    named = (tmp_path / "named.txt",)
    run(Request((tmp_path / "a.jsonl",), tmp_path / "n", validation=named, train_bpe=500))

    held_out = {document[:2] for document in documents_of(tmp_path / "o", "validation")}
    assert 5 < len(held_out) < 40
    assert words_of(tmp_path / "o") & {*PAIRS} == {*PAIRS} - held_out
    assert words_of(tmp_path / "n") & {*PAIRS, "mn"} == {*PAIRS}


def test_a_vocabulary_is_learnt_from_the_beginning_of_each_part(tmp_path: Path) -> None:
    records = [json.dumps({"text": f"{pair} " * 50}) + "\n" for pair in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(records))
    size = len(records[0])

    request = Request(
        (tmp_path / "a.jsonl",),
        tmp_path / "o",
        train_bpe=500,
        part_bytes=8 * size - 1,
        bpe_sample_bytes=16 * size,
    )
    run(request)

    assert words_of(tmp_path / "o") & {*PAIRS} == {
        pair for number, pair in enumerate(PAIRS) if number % 8 < 3
    }


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([b"\xff", b""], r"input: no document can be used \(1 not UTF-8, 1 empty; the first: \S+0"),
        ([], r"input: no document can be used \(all are empty\); name UTF-8 text files or JSONL"),
    ],
)
def test_nothing_that_can_be_used_is_an_error(
    contents: list[bytes], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number, content in enumerate(contents):
        (tmp_path / "in" / str(number)).write_bytes(content)

    with pytest.raises(DataError, match=message):
        run(Request((tmp_path / "in",), tmp_path / "o"))
    assert not list((tmp_path / "o").glob("t*"))


def test_a_split_that_stays_empty_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one document")

    with pytest.raises(DataError, match="validation: none of the 1 documents is left for it; give"):
        run(Request((tmp_path / "a",), tmp_path / "o", validation_fraction=1e-6))


# -- refusals and bounds --------------------------------------------------------------------


def test_too_small_a_vocabulary_is_refused(library: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--train-bpe: 256 words are fewer than the 256 bytes"):
        run(requested(library, tmp_path / "o", train_bpe=256))


@pytest.mark.parametrize("out", [".", "more/.."])
def test_a_folder_that_is_read_is_not_written_into(out: str, library: Path) -> None:
    with pytest.raises(ConfigError, match=r"would be read while \S+ is written; choose a folder"):
        run(requested(library, library / out))


def test_the_result_may_lie_below_the_text(library: Path) -> None:
    run(requested(library, library / "tokens"))
    before = outputs(library / "tokens")
    shutil.rmtree(library / "tokens")

    run(requested(library, library / "tokens"))

    assert outputs(library / "tokens") == before


def test_a_place_that_cannot_be_written_is_named(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match=r"--out: \S+ cannot be written \(Not a directory\)"):
        run(requested(library, tmp_path / "file" / "o"))


MEASURED = """
import io, resource, sys
from pathlib import Path
from axsparse.data.prepare.documents import Reading
from axsparse.data.prepare.preparation import prepare
from axsparse.data.prepare.request import Request
from axsparse.runtime.console import Console
source, out, bpe = sys.argv[1:]
request = Request(
    (Path(source),), Path(out), train_bpe=int(bpe) or None, part_bytes=1 << 20,
    bpe_sample_bytes=10_000, reading=Reading(max_line=1 << 20),
)
prepare(request, 1, Console(io.StringIO(), bar=False))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("kind", ["bytes", "BPE", "huge JSONL line"])
def test_memory_does_not_grow_with_the_text(kind: str, tmp_path: Path) -> None:
    megabytes = {"bytes": 60, "BPE": 5, "huge JSONL line": 60}[kind]
    peaks = []
    for factor in (1 if kind == "BPE" else 3, megabytes):
        path = tmp_path / (f"{factor}.jsonl" if "JSONL" in kind else f"{factor}.txt")
        with path.open("w") as file:
            file.write('{"text": "usable"}\n' if "JSONL" in kind else "")
            for _ in range(factor):
                file.write("x" * 1_000_000 if "JSONL" in kind else LINE * (1_000_000 // len(LINE)))
        command = [path, tmp_path / str(factor), "300" if kind == "BPE" else "0"]
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *map(str, command)],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout))

    # A part takes a fraction of this, and the whole text would take many times as much.
    assert peaks[1] - peaks[0] < (6 if kind == "BPE" else 16) * 1_000_000
