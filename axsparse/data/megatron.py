"""Token ids that Megatron-LM's tools have written, read where they lie, by memory map.

<path>.bin   ids, nothing else
<path>.idx   how long each sequence is, and which of them each document begins with
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from axsparse.data.token_file import SAMPLED_BYTES, sampled
from axsparse.runtime.errors import DataError, reading

HEADER = struct.Struct("<9sQBQQ")
"""The header of an .idx file: magic, version, type of ids, number of sequences, number of documents
+ 1. The length of each sequence (int32) follows, then the byte of the .bin at which it begins
(int64), then the sequence that each document begins with (int64), then perhaps a byte for each
sequence."""
MAGIC, VERSION = b"MMIDIDX\0\0", 1
TYPES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}
"""Types of ids by their numbers; of signed ones, whose ids are not negative."""
CHECKED = 1 << 20
"""Sequences whose lengths and places are compared at a time."""
ENDINGS = (".bin", ".idx")


def is_megatron(path: Path, where: str) -> bool:
    """Whether a path is one of Megatron's two files, or what their names begin with; `where` names
    the setting in messages."""
    with reading(f"{where}: {path}", "make it readable, or name another place"):
        return path.suffix in ENDINGS or Path(f"{path}.idx").is_file()


class MegatronIds:
    """The ids of a .bin file, whose sequences are adjacent, as every writer leaves them."""

    def __init__(self, path: Path, where: str) -> None:
        """`path` is as in `is_megatron`, `where` names the setting in messages.

        Raises DataError for damaged files, MissingInputError for files that cannot be read.
        """
        stem = path.with_suffix("") if path.suffix in ENDINGS else path
        self._index, data, self._where = Path(f"{stem}.idx"), Path(f"{stem}.bin"), where
        suggestion = "copy both files again, or make them again"
        raw = (
            f"{suggestion}; ids in a file alone are for ax.TokenDataset in Python, by np.memmap"
            if data.exists()
            else suggestion
        )
        with reading(f"{where}: {self._index}", raw), self._index.open("rb") as file:
            header, size = file.read(HEADER.size), self._index.stat().st_size
        with reading(f"{where}: {data}", suggestion):
            total = data.stat().st_size
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            self._reject("is no index of Megatron's indexed datasets (MMIDIDX)")
        _, version, code, self._sequences, self._documents = HEADER.unpack(header)
        if version != VERSION or code not in TYPES:
            self._reject(f"has version {version} and ids of type {code}, which is not known")
        expected = HEADER.size + 12 * self._sequences + 8 * self._documents
        if size not in (expected, expected + self._sequences):
            self._reject(
                f"has {size} bytes; {self._sequences} sequences and {self._documents} ends of "
                f"documents take {expected}"
            )
        if not self._sequences or self._documents < 2 or not total:
            self._reject("has no document")
        self.tokens: NDArray[Any] = np.memmap(data, TYPES[code], "r")
        """(N,) unsigned integers."""
        end = self._end()
        if end != total:
            self._reject(f"has sequences of {end} bytes, and {data.name} has {total}")

    def _end(self) -> int:
        """The byte at which the last sequence ends; DataError unless all are adjacent."""
        lengths = np.memmap(self._index, "<i4", "r", HEADER.size, (self._sequences,))
        places, end, width = self._places(), 0, self.tokens.dtype.itemsize
        for first in range(0, self._sequences, CHECKED):
            some = lengths[first : first + CHECKED].astype(np.int64)
            ends = end + np.cumsum(some) * width
            wrong = (some < 0) | (places[first : first + CHECKED] != ends - some * width)
            if wrong.any():
                number = first + int(wrong.argmax())
                self._reject(
                    f"sequence {number} has {lengths[number]} ids from byte {places[number]} on, "
                    "not after the one before it"
                )
            end = int(ends[-1])
        return end

    def _places(self) -> NDArray[np.int64]:
        """The byte at which each sequence begins."""
        offset = HEADER.size + 4 * self._sequences
        return np.memmap(self._index, "<i8", "r", offset, (self._sequences,))

    def begins(self) -> NDArray[np.int64]:
        """The positions at which documents begin, ascending from 0: 8 bytes for each."""
        offset = HEADER.size + 12 * self._sequences
        first = np.fromfile(self._index, "<i8", self._documents, offset=offset)
        if first[0] or first[-1] != self._sequences or (np.diff(first) < 0).any():
            self._reject(f"has documents that do not divide its {self._sequences} sequences")
        # A document without sequences at the end begins after the last one.
        positions = np.append(self._places() // self.tokens.dtype.itemsize, self.tokens.size)
        return np.asarray(positions[first[:-1]])

    @property
    def fingerprint(self) -> str:
        """A digest of type and numbers, and of 1024 blocks of ids, evenly spread."""
        size, dtype = self.tokens.size, self.tokens.dtype
        facts = f"{size} {dtype.str} {self._documents}"
        digest = hashlib.blake2b(facts.encode(), digest_size=16)
        block = min(size, SAMPLED_BYTES // dtype.itemsize)
        for first in sampled(size, block):
            digest.update(np.ascontiguousarray(self.tokens[first : first + block]).data)
        return digest.hexdigest()

    def _reject(self, what: str) -> NoReturn:
        raise DataError(
            f"{self._where}: {self._index} {what}; copy both files again, or make them again"
        )
