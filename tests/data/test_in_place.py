"""Token ids of other programs, read where they lie, and files that are damaged or made to harm."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.preparing import run, write_megatron, write_saved, write_table

from axsparse.config.load import configure
from axsparse.data.in_place import InPlace, in_place
from axsparse.data.preparation import Request
from axsparse.data.sources import open_datasets
from axsparse.runtime.errors import DataError, MissingInputError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13]]
FLAT = [id_ for document in DOCUMENTS for id_ in document]
ROWS = [{"input_ids": document} for document in DOCUMENTS]
HEAD = 34
"""Bytes of an index before the lengths."""


def found_at(path: Path) -> InPlace:
    found = in_place(path, "data.path")
    assert found is not None
    return found[0]


def all_of(found: InPlace) -> list[int]:
    ids: list[int] = found.tokens[np.arange(found.tokens.size)].tolist()
    return ids


@pytest.mark.parametrize("code", [1, 4, 5, 8])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatrons_ids_are_mapped(code: int, ending: str, tmp_path: Path) -> None:
    stem = write_megatron(tmp_path / "v1.text_document", DOCUMENTS, code)

    found = found_at(Path(f"{stem}{ending}"))

    assert isinstance(found.tokens, np.memmap)
    assert all_of(found) == FLAT
    assert found.begins().tolist() == [0, 3, 4, 8]
    assert (found.documents, found.tokens.dtype.kind) == (4, "u")


def test_documents_of_several_sequences_begin_where_the_index_says(tmp_path: Path) -> None:
    index = Path(f"{write_megatron(tmp_path / 'c', DOCUMENTS)}.idx")
    content = index.read_bytes()
    modes = b"\0" * 4  # A byte for each sequence, which some writers add.
    two = struct.pack("<9sQBQQ", *struct.unpack("<9sQBQ", content[:26]), 4)
    index.write_bytes(two + content[HEAD:-40] + struct.pack("<4q", 0, 2, 2, 4) + modes)

    found = found_at(tmp_path / "c")

    assert found.begins().tolist() == [0, 4, 4]
    assert all_of(found) == FLAT


@pytest.mark.parametrize("files", [1, 2, 4])
def test_what_datasets_saves_is_mapped_file_after_file(files: int, tmp_path: Path) -> None:
    found = found_at(write_saved(tmp_path / "d", ROWS, files))

    assert all_of(found) == FLAT
    assert found.begins().tolist() == [0, 3, 4, 8]
    assert found.tokens.dtype == np.uint64  # Arrow's whole numbers are int64, and stay so.
    # How ids are divided into files changes nothing.
    assert found.fingerprint == found_at(write_saved(tmp_path / "e", ROWS, 3)).fingerprint


@pytest.mark.parametrize(
    "packed",
    [
        [{"seq_lengths": [2, 1]}, {"seq_lengths": [5]}, {"seq_lengths": [1]}],
        [{"position_ids": [0, 1, 0]}, {"position_ids": [0, 1, 2, 3, 4]}, {"position_ids": [0]}],
    ],
)
def test_documents_packed_into_rows_begin_where_trl_says(
    packed: list[dict[str, Any]], tmp_path: Path
) -> None:
    ids = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    rows = [{"input_ids": some, **one} for some, one in zip(ids, packed, strict=True)]

    found = found_at(write_saved(tmp_path / "d", rows))

    assert (found.documents, found.begins().tolist()) == (4, [0, 2, 3, 8])


def test_a_data_set_of_splits_has_training_and_validation(tmp_path: Path) -> None:
    write_saved(tmp_path / "d" / "train", ROWS)
    write_saved(tmp_path / "d" / "validation", ROWS[:2], 1)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    settings = [f"data.path={tmp_path / 'd'}", "data.source=tokens", "model.sequence_length=3"]

    data: Any = open_datasets(configure(None, settings))

    assert data.validation is not None
    assert (data.training.name, data.validation.name) == (
        *("tokens d train", "tokens d validation"),
    )
    assert (len(data.training), len(data.validation)) == (2, 1)
    assert data.training.vocab_size == 256


def test_the_fingerprint_is_of_ids_type_and_documents(tmp_path: Path) -> None:
    others = {
        "ids": [[5, 6, 7], [8], [9, 10, 11, 12], [14]],
        "documents": [[5, 6, 7], [8], [9, 10, 11, 12, 13]],
        "more": [*DOCUMENTS, [1]],
    }
    same = [found_at(write_megatron(tmp_path / name, DOCUMENTS)) for name in ("a", "b")]
    other = [found_at(write_megatron(tmp_path / name, some)) for name, some in others.items()]
    other.append(found_at(write_megatron(tmp_path / "type", DOCUMENTS, 4)))

    assert same[0].fingerprint == same[1].fingerprint
    assert len({one.fingerprint for one in (same[0], *other)}) == 5


# -- damage ---------------------------------------------------------------------------------


def patched(at: int, form: str, value: int, ending: str = ".idx") -> Callable[[Path], Path]:
    """A change of one number of a file."""

    def change(folder: Path) -> Path:
        path = Path(f"{write_megatron(folder / 'c', DOCUMENTS)}{ending}")
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, at, value)
        path.write_bytes(content)
        return folder / "c"

    return change


def cut(ending: str, size: int) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        path = Path(f"{write_megatron(folder / 'c', DOCUMENTS)}{ending}")
        path.write_bytes(path.read_bytes()[:size])
        return folder / "c"

    return change


def gone(folder: Path) -> Path:
    Path(f"{write_megatron(folder / 'c', DOCUMENTS)}.bin").unlink()
    return folder / "c"


def arrow_of(rows: list[dict[str, Any]]) -> Callable[[Path], Path]:
    return lambda folder: write_table(folder / "a.arrow", rows)


def arrow_cut(folder: Path) -> Path:
    path = write_table(folder / "a.arrow", ROWS * 9)
    path.write_bytes(path.read_bytes()[:-300])
    return path


def arrow_flipped(folder: Path) -> Path:
    """Lists that reach beyond the ids."""
    path = write_table(folder / "a.arrow", ROWS, batch=9)
    offsets = struct.pack("<5i", 0, 3, 4, 8, 9)
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<5i", 0, 3, 4, 8, 2**30)))
    return path


def state_of(state: object) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        path = write_saved(folder / "d", ROWS)
        (path / "state.json").write_text(json.dumps(state))
        return path

    return change


def stateless(folder: Path) -> Path:
    (folder / "d" / "train").mkdir(parents=True)
    (folder / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return folder / "d"


DAMAGE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "magic": (patched(0, "<B", 0), r"c\.idx is no index of Megatron's indexed datasets \(MMIDIDX"),
    "version": (patched(9, "<Q", 2), r"c\.idx has version 2, and 1 is known; copy both files"),
    "float ids": (patched(17, "<B", 7), r"c\.idx has ids of type 7, which is none of whole numb"),
    "type 99": (patched(17, "<B", 99), r"c\.idx has ids of type 99, which"),
    "2^31 sequences": (patched(18, "<Q", 2**31), r"has 122 bytes; 2147483648 sequences and 5 end"),
    "2^63 documents": (patched(26, "<Q", 2**63), r"has 122 bytes; 4 sequences and 92233720368547"),
    "negative length": (patched(38, "<i", -1), r"sequence 1 has -1 ids from byte 6 on, not after"),
    "longer": (patched(46, "<i", 9), r"c\.bin has 18 bytes, and the sequences of c\.idx 34; copy"),
    "beyond the bin": (patched(58, "<q", 2**40), r"sequence 1 has 1 ids from byte 1099511627776 "),
    "before the bin": (patched(58, "<q", -6), r"sequence 1 has 1 ids from byte -6 on, not after"),
    "index cut": (cut(".idx", 90), r"c\.idx has 90 bytes; 4 sequences and 5 ends of documents"),
    "header cut": (cut(".idx", 20), r"c\.idx is no index of Megatron's"),
    "bin cut": (cut(".bin", 17), r"c\.bin has 17 bytes, and the sequences of c\.idx 18; copy both"),
    "empty bin": (cut(".bin", 0), r"c\.idx has no document"),
    "arrow cut": (arrow_cut, r"a\.arrow is no readable Arrow file \(.+\); copy it again"),
    "arrow offsets": (arrow_flipped, r"a\.arrow is no readable Arrow file \(.+\); copy it again"),
    "no ids": (arrow_of([{"text": "a"}]), r"has no column input_ids, but text; prepare texts by"),
    "texts": (arrow_of([{"input_ids": "a"}]), r"has string, or nulls, as input_ids from row 1 on"),
    "floats": (arrow_of([{"input_ids": [0.5]}]), r"has list<\w+: double>, or nulls, as input_ids"),
    "null": (arrow_of([*ROWS, {"input_ids": None}]), r"or nulls, as input_ids from row 4 on; giv"),
    "null id": (arrow_of([{"input_ids": [1, None]}]), r"or nulls, as input_ids from row 1 on; "),
    "no rows": (arrow_of([{"input_ids": []}]), r"or nulls|has no ids"),
    "labels": (arrow_of([{"input_ids": [1], "labels": [1]}]), r"has labels, which are not read in"),
    "a mask": (
        arrow_of([{"input_ids": [1], "completion_mask": [1]}]),
        r"has completion_mask, which are not read in place; prepare it by",
    ),
    "padding": (
        arrow_of([{"input_ids": [1, 2], "attention_mask": [1, 0]}]),
        r"has an attention_mask with padding, which are not read in place; prepare it by",
    ),
    "lengths": (
        arrow_of([{"input_ids": [1, 2], "seq_lengths": [3]}]),
        r"has seq_lengths that do not divide its rows of input_ids into documents; pack it again",
    ),
    "positions": (
        arrow_of(
            [{"input_ids": [1], "position_ids": [0]}] * 2
            + [{"input_ids": [1], "position_ids": [1]}]
        ),
        r"has position_ids that do not divide its rows of input_ids into documents; pack it",
    ),
    "state": (state_of([]), r"state\.json lists no files; save the data again"),
    "selection": (
        state_of({"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "i"}]}),
        r"state\.json is a selection of rows; save it again after flatten_indices\(\)",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_in_one_line(kind: str, tmp_path: Path) -> None:
    make, message = DAMAGE[kind]
    path = make(tmp_path)

    with pytest.raises(DataError, match=rf"^data\.path: .*({message})") as caught:
        in_place(path, "data.path")

    assert "\n" not in str(caught.value)


GONE = (
    r"c\.bin cannot be read",
    "d/shadow is not there; c",
    r"train/state\.json cannot be read \(.*\); name a folder that save_to_disk wrote",
)


@pytest.mark.parametrize(
    "make", [gone, stateless, state_of({"_data_files": [{"filename": "../../etc/shadow"}]})]
)
def test_files_that_are_not_there_are_missing(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="|".join(GONE)):
        in_place(make(tmp_path), "data.path")


def test_what_the_system_does_not_open_is_told_with_a_mend() -> None:
    with pytest.raises(
        MissingInputError, match=r"cannot be read \(.*\); make it readable, or name another place"
    ):
        in_place(Path("x" * 300), "data.path")


def test_an_empty_document_is_left_out_by_its_row(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[1], [], [2]])

    sidecar, _ = run(Request((tmp_path / "c.bin",), tmp_path / "out"))

    assert sidecar.sources.examples == (f"{tmp_path}/c.idx, row 2: empty",)
    assert (sidecar.train.documents, sidecar.train.tokens) == (2, 4)
