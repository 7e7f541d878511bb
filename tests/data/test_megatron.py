"""Token ids of Megatron-LM, read where they lie; tests/errors has files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from support.preparing import write_megatron

from axsparse.data.megatron import MegatronIds, is_megatron

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
