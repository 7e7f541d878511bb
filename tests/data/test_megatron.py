"""Token ids of Megatron-LM, read where they lie, and files that are damaged or made to harm."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.preparing import write_megatron

from axsparse.data.megatron import MegatronIds, is_megatron
from axsparse.runtime.errors import DataError, MissingInputError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13]]
FLAT = [id_ for document in DOCUMENTS for id_ in document]
HEAD = 34
"""Bytes of an index before the lengths."""


def found_at(path: Path) -> MegatronIds:
    assert is_megatron(path, "data.path")
    return MegatronIds(path, "data.path")


@pytest.mark.parametrize("code", [1, 4, 5, 8])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_ids_are_mapped(code: int, ending: str, tmp_path: Path) -> None:
    stem = write_megatron(tmp_path / "v1.text_document", DOCUMENTS, code)

    found = found_at(Path(f"{stem}{ending}"))

    assert isinstance(found.tokens, np.memmap)
    assert found.tokens.tolist() == FLAT
    assert found.begins().tolist() == [0, 3, 4, 8]
    assert found.tokens.dtype.kind == "u"


def test_documents_of_several_sequences_begin_where_the_index_says(tmp_path: Path) -> None:
    index = Path(f"{write_megatron(tmp_path / 'c', DOCUMENTS)}.idx")
    content = index.read_bytes()
    modes = b"\0" * 4  # A byte for each sequence, which some writers add.
    two = struct.pack("<9sQBQQ", *struct.unpack("<9sQBQ", content[:26]), 4)
    index.write_bytes(two + content[HEAD:-40] + struct.pack("<4q", 0, 2, 2, 4) + modes)

    found = found_at(tmp_path / "c")

    assert found.begins().tolist() == [0, 4, 4]
    assert found.tokens.tolist() == FLAT


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


def patched(at: int, form: str, value: int) -> Callable[[Path], None]:
    """A change of one number of the index."""

    def change(stem: Path) -> None:
        path = Path(f"{stem}.idx")
        content = bytearray(path.read_bytes())
        struct.pack_into(form, content, at, value)
        path.write_bytes(content)

    return change


def cut(ending: str, size: int) -> Callable[[Path], None]:
    def change(stem: Path) -> None:
        path = Path(f"{stem}{ending}")
        path.write_bytes(path.read_bytes()[:size])

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (patched(0, "<B", 0), r"is no index of Megatron's indexed datasets \(MMIDIDX\)"),
    "version": (patched(9, "<Q", 2), r"has version 2 and ids of type 8, which is not known; copy"),
    "float ids": (patched(17, "<B", 7), r"has version 1 and ids of type 7, which is not known"),
    "2^31 sequences": (patched(18, "<Q", 2**31), r"has 122 bytes; 2147483648 sequences and 5 end"),
    "2^63 documents": (patched(26, "<Q", 2**63), r"has 122 bytes; 4 sequences and 92233720368547"),
    "negative length": (patched(38, "<i", -1), r"sequence 1 has -1 ids from byte 6 on, not after"),
    "longer": (patched(46, "<i", 9), r"has sequences of 34 bytes, and c\.bin has 18; copy both"),
    "beyond the bin": (patched(58, "<q", 2**40), r"sequence 1 has 1 ids from byte 1099511627776 "),
    "before the bin": (patched(58, "<q", -6), r"sequence 1 has 1 ids from byte -6 on, not after"),
    "index cut": (cut(".idx", 90), r"has 90 bytes; 4 sequences and 5 ends of documents take 122;"),
    "header cut": (cut(".idx", 20), r"is no index of Megatron's"),
    "bin cut": (cut(".bin", 16), r"has sequences of 18 bytes, and c\.bin has 16; copy both files"),
    "empty bin": (cut(".bin", 0), r"has no document"),
    "documents": (
        patched(90, "<q", 7),
        r"has documents that do not divide its 4 sequences; copy both",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_in_one_line(kind: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[kind]
    harm(write_megatron(tmp_path / "c", DOCUMENTS))

    with pytest.raises(DataError, match=rf"^data\.path: \S+c\.idx {message}") as caught:
        found_at(tmp_path / "c").begins()

    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_are_missing(tmp_path: Path) -> None:
    Path(f"{write_megatron(tmp_path / 'c', DOCUMENTS)}.bin").unlink()

    with pytest.raises(MissingInputError, match=r"c\.bin cannot be read"):
        found_at(tmp_path / "c")
    with pytest.raises(
        MissingInputError, match=r"cannot be read \(.*\); make it readable, or name another place"
    ):
        is_megatron(Path("x" * 300), "data.path")
