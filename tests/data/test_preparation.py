"""The entire preparation: the files it writes, and that finished work is used and never
overwritten."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mpirun import LONGEST_SECONDS
from support.preparing import LINE, make_library, outputs, requested, run, write_jsonl

from axsparse.data import preparation
from axsparse.data.documents import Reading
from axsparse.data.preparation import Request
from axsparse.data.sources import token_datasets
from axsparse.data.token_file import Split, read_sidecar, stored, token_path
from axsparse.data.tokenizers import SEPARATOR
from axsparse.runtime.errors import MissingInputError, OutputError


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


def resize(patch: pytest.MonkeyPatch, **sizes: dict[str, int]) -> None:
    """Other sizes of pieces and batches, by the names of their constants in each module."""
    for module, constants in sizes.items():
        for name, size in constants.items():
            patch.setattr(f"axsparse.data.{module}.{name}", size)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return make_library(tmp_path / "library")


# -- what comes out -------------------------------------------------------------------------


@pytest.mark.parametrize("bpe", [None, 300])
def test_neither_batches_nor_pieces_change_a_byte(
    library: Path, tmp_path: Path, bpe: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(requested(library, tmp_path / "1", train_bpe=bpe))
    resize(
        monkeypatch, documents={"PIECE": 100, "SLACK": 50}, preparation={"BATCH": 50, "SAVED": 3}
    )
    run(requested(library, tmp_path / "4", train_bpe=bpe))

    assert outputs(tmp_path / "1") == outputs(tmp_path / "4")
    assert set(outputs(tmp_path / "1")) == {
        *("train.tokens", "validation.tokens", "tokens.json"),
        *(() if bpe is None else ("tokenizer.json",)),
    }


def test_byte_pairs_are_those_of_each_document(library: Path, tmp_path: Path) -> None:
    import tokenizers

    run(requested(library, tmp_path / "words", train_bpe=300))
    run(requested(library, tmp_path / "bytes"))

    documents = documents_of(tmp_path / "words")
    assert documents == documents_of(tmp_path / "bytes")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "words" / "tokenizer.json"))
    together = [id_ for text in documents for id_ in (*tokenizer.encode(text).ids, 0)]
    assert ids_of(tmp_path / "words").tolist() == together
    assert ids_of(tmp_path / "words").dtype == np.uint16


def test_words_of_a_tokenizer_that_no_text_has_need_no_rows(library: Path, tmp_path: Path) -> None:
    import tokenizers

    run(requested(library, tmp_path / "trained", train_bpe=300))
    padded = tokenizers.Tokenizer.from_file(str(tmp_path / "trained" / "tokenizer.json"))
    padded.add_special_tokens(["<pad>"])
    padded.save(str(tmp_path / "padded.json"))

    sidecar, _ = run(requested(library, tmp_path / "o", tokenizer=tmp_path / "padded.json"))

    training = token_datasets(tmp_path / "o", 16, ("train",))["train"]
    assert sidecar.vocab_size == 301
    assert training.vocab_size == 1 + max(
        ids_of(tmp_path / "o", split).max() for split, _ in sidecar.splits()
    )
    assert training.vocab_size <= 300


def test_a_fraction_of_the_documents_is_held_out_and_equal_ones_fall_alike(tmp_path: Path) -> None:
    texts = [f"document {number}\n" for number in range(1000)] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))

    sidecar, _ = run(Request((tmp_path / "a.jsonl",), tmp_path / "o", validation_fraction=0.2))

    training, held_out = (documents_of(tmp_path / "o", split) for split in ("train", "validation"))
    assert sorted(training + held_out) == sorted(texts)
    assert not set(training) & set(held_out)
    assert sidecar.validation is not None
    assert sidecar.validation.documents == len(held_out) == pytest.approx(400, abs=60)


@pytest.mark.parametrize(("split", "fraction"), [("none", 0.1), ("none", 0.999), ("lines:10", 0.1)])
def test_documents_that_all_fall_to_one_split_are_divided_by_tokens(
    split: str, fraction: float, tmp_path: Path
) -> None:
    """So one file is enough; equal documents go to the same split."""
    book, out = tmp_path / "book.txt", tmp_path / "out"
    book.write_text(LINE * 20)
    reading = Reading(split)
    run(Request((book,), tmp_path / "whole", reading=reading))
    request = Request((book,), out, validation_fraction=fraction, reading=reading)

    sidecar, said = run(request)

    whole = np.fromfile(tmp_path / "whole" / "train.tokens", np.uint8)
    parts = [np.fromfile(out / f"{name}.tokens", np.uint8) for name in ("train", "validation")]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert sidecar.validation is not None
    assert len(parts[1]) == sidecar.validation.tokens == round(fraction * len(whole))
    assert "cannot be shared out" in said
    assert "already prepared" in run(request)[1]


def test_what_is_left_out_is_counted_on_the_screen_and_in_the_sidecar(
    library: Path, tmp_path: Path
) -> None:
    sidecar, screen = run(requested(library, tmp_path / "o"))

    assert sidecar.sources.left_out == {"unreadable": 1, "not UTF-8": 1, "empty": 1}
    assert sidecar.sources.examples == (
        f"{library}/lost.txt: unreadable",
        f"{library}/latin.txt, line 1: not UTF-8",
        f"{library}/more/0.txt, line 1: empty",
    )
    assert "left out 3 documents: 1 unreadable, 1 not UTF-8, 1 empty\n" in screen
    for example in sidecar.sources.examples:
        assert f"  {example}\n" in screen
    assert re.search(r"^train: \d{3} documents, \S+k tokens$", screen, re.MULTILINE)


def test_a_completion_without_tokens_is_left_out_alone(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'axsparse[test]'")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, SEPARATOR: 2}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    records = [{"prompt": "", "completion": "\n"}, {"prompt": "a ", "completion": "b"}]
    source = write_jsonl(tmp_path / "in.jsonl", records)

    sidecar, _ = run(Request((source,), tmp_path / "o", tokenizer=tmp_path / "words.json"))

    assert sidecar.sources.left_out == {"empty": 1} and sidecar.train.documents == 1


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "completion": ""},
        {"prompt": "\ud800", "completion": "x"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": []},
    ],
    ids=["empty", "no UTF-8", "an unanswered chat"],
)
def test_records_that_are_left_out_do_not_say_what_the_others_are(
    record: dict[str, Any], tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "ab"}, record])

    sidecar, _ = run(Request((source,), tmp_path / "o"))

    assert sum(sidecar.sources.left_out.values()) == 1
    assert documents_of(tmp_path / "o") == ["ab"]
    assert not sidecar.marked


def test_of_records_that_are_several_documents_the_screen_says_which_is_taken(
    tmp_path: Path,
) -> None:
    records = [{"text": "a", "input_ids": [65, 66]}] * 2 + [{"text": "b", "messages": "none"}]
    path = write_jsonl(tmp_path / "a.jsonl", records)

    _, screen = run(Request((path,), tmp_path / "o"))
    _, named = run(Request((path,), tmp_path / "text", reading=Reading(jsonl_field="text")))

    assert documents_of(tmp_path / "o") == ["AB", "AB", "b"]
    assert "2 records with several contents: input_ids taken, text left out; `axsparse" in screen
    assert documents_of(tmp_path / "text") == ["a", "a", "b"]
    assert "several contents" not in named


def test_a_long_document_with_a_bad_byte_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"word\n" * 100 + b"\xff" + b" word\n" * 100)
    (tmp_path / "b").write_bytes(b"good")
    resize(monkeypatch, documents={"STRETCH": 64, "PIECE": 9}, preparation={"BATCH": 20})

    sidecar, _ = run(Request((tmp_path / "a", tmp_path / "b"), tmp_path / "o"))

    assert documents_of(tmp_path / "o") == ["good"]
    assert sidecar.sources.examples == (f"{tmp_path}/a, line 1: not UTF-8",)


PAIRS = [f"{a}{b}" for a in "abcdefgh" for b in "stuvwxyz"]


def words_of(folder: Path) -> set[str]:
    """The words of a learnt vocabulary that are two characters long."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {word for word in vocabulary if len(word) == 2}


def test_a_vocabulary_is_learnt_from_an_even_share_of_the_training_documents(
    tmp_path: Path,
) -> None:
    records = [json.dumps({"text": f"{pair} " * 50}) + "\n" for pair in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(records))
    (tmp_path / "named.txt").write_text("mn " * 500)
    source = (tmp_path / "a.jsonl",)

    run(Request(source, tmp_path / "o", validation_fraction=0.3, train_bpe=500))
    run(Request(source, tmp_path / "n", validation=(tmp_path / "named.txt",), train_bpe=500))
    share = len("".join(records)) // 4
    run(Request(source, tmp_path / "s", train_bpe=500, bpe_sample_bytes=share))

    held_out = {document[:2] for document in documents_of(tmp_path / "o", "validation")}
    assert 5 < len(held_out) < 40
    assert words_of(tmp_path / "o") & {*PAIRS} == {*PAIRS} - held_out
    assert words_of(tmp_path / "n") & {*PAIRS, "mn"} == {*PAIRS}
    assert words_of(tmp_path / "s") & {*PAIRS} == {*PAIRS[::4]}


def test_ctrl_c_ends_the_command_while_the_library_learns(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's handler would run once the library returns, which may take minutes."""
    monkeypatch.setattr(
        preparation, "train_bpe", lambda *_: heard.append(signal.getsignal(signal.SIGINT))
    )
    heard: list[Any] = []
    before = signal.signal(signal.SIGINT, interrupt)
    with pytest.raises(TypeError):  # nothing was learnt
        run(Request((library,), tmp_path / "o", train_bpe=500))

    assert heard == [signal.SIG_DFL]
    assert signal.signal(signal.SIGINT, before) is interrupt


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    names = ("3.txt", "60.txt", "3.jsonl", "60.jsonl")
    for name in names:
        path, is_text = tmp_path / name, name.endswith("txt")
        with path.open("w") as file:
            file.write("" if is_text else '{"text": "usable"}\n')
            for _ in range(int(path.stem)):
                file.write(LINE * (1_000_000 // len(LINE)) if is_text else "x" * 1_000_000)
    command = [sys.executable, "-c", MEASURED, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = [int(line) for line in done.stdout.split()]

    # The whole text would take at least 60 MB.
    assert peaks[1] - peaks[0] < 30_000_000  # three stretches of 8 MiB as bytes and as text
    assert peaks[3] - peaks[2] < 16_000_000


MEASURED = """
import io, resource, sys
from pathlib import Path
from axsparse.data.documents import Reading
from axsparse.data.preparation import Request, prepare
from axsparse.runtime.console import Console
for name in sys.argv[1:]:
    request = Request((Path(name),), Path(name + "-out"), reading=Reading(max_line=1 << 20))
    prepare(request, 1, Console(io.StringIO(), bar=False))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


# -- a folder that is not empty -------------------------------------------------------------

GOES_ON, LEARNS, IS_DONE = "from an earlier run", "learning", "already prepared"
DEATHS: dict[str, tuple[str, int, list[str]]] = {
    # phase: the function that is replaced by one that kills its process, at which call, and what a
    # second run says
    "before the vocabulary is learnt": ("train_bpe", 1, [LEARNS]),
    "after the vocabulary": ("library_version", 2, []),
    "before the first record": ("_Writer.save", 1, []),
    "after the third record": ("_Writer.save", 4, [GOES_ON]),
    "within a document": ("_Writer._append", 55, [GOES_ON]),
    "after the last document": ("_reject_empty", 1, [GOES_ON]),
    "before the files are moved": ("sample_digest", 2, [GOES_ON]),
    "before the sidecar": ("Sidecar", 1, [LEARNS]),
    "before the rest is removed": ("shutil.rmtree", 1, [IS_DONE]),
}


KILLED = """
import io, os, pickle, signal, sys
from axsparse.data import documents, preparation
from axsparse.runtime.console import Console
documents.PIECE, documents.SLACK, documents.STRETCH = 300, 30, 700
preparation.BATCH, preparation.SAVED = 900, 2
for request, place, call in pickle.loads(bytes.fromhex(sys.argv[1])):
    if child := os.fork():
        print(os.waitpid(child, 0)[1])
        continue
    *owners, name = place.split(".")
    owner = preparation
    for step in owners:
        owner = getattr(owner, step)
    real, calls = getattr(owner, name), 0
    def dying(*args, **kwargs):
        global calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(owner, name, dying)
    preparation.prepare(request, 1, Console(io.StringIO(), bar=False))
    os._exit(1)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder of text, and the files that an uninterrupted preparation makes of it."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "in").mkdir()
    for number in range(12):
        text = "".join(f"{number} {line} {LINE}" for line in range(40))
        (folder / "in" / str(number)).write_text(text)
    (folder / "in" / "5").write_bytes(text.encode() + b"\xff")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        run(restartable(folder, folder / "whole"))
    return folder, outputs(folder / "whole")


def small(patch: pytest.MonkeyPatch) -> None:
    """Documents of many stretches and pieces, whose progress is recorded often."""
    sizes = {"PIECE": 300, "SLACK": 30, "STRETCH": 700}
    resize(patch, documents=sizes, preparation={"BATCH": 900, "SAVED": 2})


def restartable(folder: Path, out: Path) -> Request:
    return Request((folder / "in",), out, validation_fraction=0.2, train_bpe=300)


def test_a_killed_run_goes_on_where_it_was_and_ends_in_the_same_bytes(
    shared: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    folder, expected = shared
    requests = {phase: restartable(folder, tmp_path / phase) for phase in DEATHS}
    orders = [(requests[phase], place, call) for phase, (place, call, _) in DEATHS.items()]
    command = [sys.executable, "-c", KILLED, pickle.dumps(orders).hex()]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LONGEST_SECONDS, check=True)
    assert done.stdout.split() == [b"9"] * len(DEATHS)

    for phase, request in requests.items():
        *_, said = DEATHS[phase]
        assert (request.out / "tokens.json").exists() == (said == [IS_DONE])
        _, screen = run(request)

        assert outputs(request.out) == expected, phase
        assert [words for words in (GOES_ON, LEARNS, IS_DONE) if words in screen] == said, phase


def test_progress_that_does_not_fit_the_files_is_no_progress(
    shared: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    folder, expected = shared
    request = restartable(folder, tmp_path / "out")
    harms: list[Callable[[Path], object]] = [
        lambda part: (part / "train.tokens").write_bytes(b"short"),
        lambda part: (part / "progress.json").write_text("{"),
    ]
    for harm in harms:
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "_reject_empty", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(request)
        [part] = request.out.glob("parts-*")
        harm(part)
    _, screen = run(request)

    assert "earlier run" not in screen
    assert outputs(request.out) == expected


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_second_run_says_that_all_is_done_and_touches_nothing(
    library: Path, tmp_path: Path
) -> None:
    (tmp_path / "o" / f"parts-{0:032}").mkdir(parents=True)  # what another request has begun
    (tmp_path / "o" / "tokens.json.unfinished-1").touch()
    first, _ = run(requested(library, tmp_path / "o"))
    assert set(outputs(tmp_path / "o")) == {"train.tokens", "validation.tokens", "tokens.json"}
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("t*")}

    second, screen = run(requested(library, tmp_path / "o"))

    assert second == first
    assert f"{tmp_path}/o/tokens.json: already prepared from these files, and unharmed" in screen
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("t*")} == times


def test_a_folder_with_other_tokens_is_never_overwritten(library: Path, tmp_path: Path) -> None:
    run(requested(library, tmp_path / "o"))
    before = outputs(tmp_path / "o")

    with pytest.raises(OutputError, match="holds tokens of other files or settings; choose"):
        run(requested(library, tmp_path / "o", validation_fraction=0.2))
    assert outputs(tmp_path / "o") == before


def test_an_input_that_may_not_be_read_is_not_blamed_on_the_output(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "secret/m")

    monkeypatch.setattr(preparation, "find_sources", refuse)

    said = r"secret/m: cannot be read \(Permission denied\); name another input"
    with pytest.raises(MissingInputError, match=said):
        run(requested(library, tmp_path / "o"))
