"""Token ids that other programs have written, read where they lie, by memory map, and tables.

<path>.bin, <path>.idx     Megatron-LM: ids, and how long each sequence is
<folder>/*.arrow           `datasets`, as save_to_disk writes it: a column `input_ids`
<file>.arrow               the same

Tables are files of Apache Arrow and Parquet, which pyarrow reads, an optional dependency.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from axsparse.data.token_file import SAMPLED_BYTES, sampled
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, reading

if TYPE_CHECKING:
    from pyarrow import NativeFile, RecordBatch


LABELS = "labels"
"""The column of targets next to token ids."""
MASKS = ("completion_mask", "assistant_masks")
"""Columns next to token ids: 0 for tokens that are no targets."""
PADDING = "attention_mask"
"""The column next to token ids that is 0 for padding, which is no text."""
PACKED = ("seq_lengths", "position_ids")
"""Columns next to token ids that say where the documents of a row begin: their lengths, or
positions that begin anew."""
ARROW_MAGIC = b"ARROW1"
"""Begins an Arrow file with a table of contents; `datasets` writes a stream without one."""
ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""


def columns_of(file: BinaryIO, *, parquet: bool) -> list[str]:
    """The names of the columns. Raises OSError for a file that is no such table."""
    pyarrow = import_pyarrow()
    with refusing():
        if parquet:
            return list(pyarrow.parquet.ParquetFile(file).schema_arrow.names)
        return list(_opened(pyarrow, file).schema.names)


def rows_of(file: BinaryIO, columns: list[str], *, parquet: bool) -> Iterator[dict[str, Any]]:
    """The rows of a file as Python values, texts as bytes, in the memory of one row group.

    Raises OSError where the file is damaged.
    """
    pyarrow = import_pyarrow()
    with refusing():
        if parquet:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(ROWS, columns=columns)
        else:
            batches = (batch.select(columns) for batch in arrow_batches(file))
    while True:
        with refusing():
            batch = next(batches, None)
            if batch is None:
                return
            # Bytes: one text that is not UTF-8 is no reason to refuse the others.
            values = [_undecoded(pyarrow, column) for column in batch.columns]
            for column in values:
                column.validate(full=True)
            rows = pyarrow.RecordBatch.from_arrays(values, batch.schema.names).to_pylist()
        yield from rows


def _undecoded(pyarrow: Any, column: Any) -> Any:
    """A column of texts as bytes; any other column as it is."""
    kinds = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    return column.cast(kinds.get(column.type, column.type))


def arrow_batches(file: BinaryIO | NativeFile) -> Iterator[RecordBatch]:
    """The parts of an Arrow file, or of a stream."""
    reader = _opened(import_pyarrow(), file)
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _opened(pyarrow: Any, file: BinaryIO | NativeFile) -> Any:
    file.seek(0)
    begins = file.read(len(ARROW_MAGIC))
    file.seek(0)
    return pyarrow.ipc.open_file(file) if begins == ARROW_MAGIC else pyarrow.ipc.open_stream(file)


@contextmanager
def refusing() -> Iterator[None]:
    """OSError for pyarrow's errors about a damaged file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, NotImplementedError, MemoryError) as reason:
        raise OSError(0, " ".join(str(reason).split())) from reason


def import_pyarrow() -> Any:
    """The library; raises ConfigError if it is not installed."""
    # Its own pool of memory would keep freed blocks.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "files of Arrow and Parquet need pyarrow, which is not installed; "
            "pip install 'axsparse[arrow]'"
        ) from None
    return pyarrow


COLUMN = "input_ids"
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


class Joined:
    """Arrays one after the other, as one flat array that is never made."""

    ndim = 1

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        """All parts have the same type, and none is empty."""
        self._parts = parts
        self._begins = np.cumsum([0, *(part.size for part in parts)])
        self.dtype = parts[0].dtype
        self.size = int(self._begins[-1])

    def __getitem__(self, at: NDArray[np.int64]) -> NDArray[Any]:
        """The entries at these positions, in their shape."""
        found = np.empty(at.shape, self.dtype)
        numbers = np.searchsorted(self._begins, at, side="right") - 1
        for number in np.unique(numbers):
            here = numbers == number
            found[here] = self._parts[number][at[here] - self._begins[number]]
        return found


@dataclass(frozen=True)
class InPlace:
    """Token ids where they lie."""

    tokens: Any
    """(N,) unsigned integers: an array, or `Joined` ones."""
    documents: int
    """How many documents they are."""
    files: Sequence[Path]
    """The files that the ids lie in."""
    begins: Callable[[], NDArray[np.int64]]
    """Finds the positions at which documents begin, ascending from 0: 8 bytes for each."""

    @property
    def fingerprint(self) -> str:
        """A digest of type and numbers, and of 1024 blocks of ids, evenly spread."""
        size, dtype = self.tokens.size, self.tokens.dtype
        width, facts = dtype.itemsize, f"{size} {dtype.str} {self.documents}"
        digest = hashlib.blake2b(facts.encode(), digest_size=16)
        block = min(size, SAMPLED_BYTES // width)
        for first in sampled(size, block):
            ids = self.tokens[np.arange(first, first + block)]
            digest.update(np.ascontiguousarray(ids).data)
        return digest.hexdigest()


def in_place(path: Path, where: str) -> tuple[InPlace, InPlace | None] | None:
    """Training and validation ids at a path; None if the path has none of these formats.

    `where` names the setting in messages. Raises DataError for damaged files, MissingInputError for
    files that cannot be read, ConfigError for Arrow files without pyarrow.
    """
    with reading(f"{where}: {path}", "make it readable, or name another place"):
        is_named = path.suffix in (".bin", ".idx")
        stem = path.with_suffix("") if is_named else path
        index = Path(f"{stem}.idx")
        if is_named or index.is_file():
            return megatron(index, Path(f"{stem}.bin"), where), None
        if path.suffix == ".arrow" and not path.is_dir():
            return arrow([path], where), None
        if (path / "dataset_dict.json").is_file():
            if not (path / "train").is_dir():
                _reject(where, path, "has no split train", "name the folder of one split")
            held_out = path / "validation"
            return (
                arrow(_files(path / "train", where), where),
                arrow(_files(held_out, where), where) if held_out.is_dir() else None,
            )
        if (path / "state.json").is_file():
            return arrow(_files(path, where), where), None
        return None


# -- Megatron-LM ----------------------------------------------------------------------------


def megatron(index: Path, data: Path, where: str) -> InPlace:
    """The ids of a .bin file, whose sequences are adjacent, as every writer leaves them."""
    suggestion = "copy both files again, or make them again"
    with reading(f"{where}: {index}", suggestion), index.open("rb") as file:
        header, size = file.read(HEADER.size), index.stat().st_size
    with reading(f"{where}: {data}", suggestion):
        total = data.stat().st_size
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        _reject(where, index, "is no index of Megatron's indexed datasets (MMIDIDX)", suggestion)
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION:
        _reject(where, index, f"has version {version}, and {VERSION} is known", suggestion)
    if code not in TYPES:
        _reject(where, index, f"has ids of type {code}, which is none of whole numbers", suggestion)
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):
        what = f"has {size} bytes; {sequences} sequences and {documents} ends of documents take "
        _reject(where, index, f"{what}{expected}", suggestion)
    if not sequences or documents < 2 or not total:
        _reject(where, index, "has no document", suggestion)
    dtype: np.dtype[Any] = np.dtype(TYPES[code])
    lengths = np.memmap(index, "<i4", "r", HEADER.size, (sequences,))
    places = np.memmap(index, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
    end = 0
    for first in range(0, sequences, CHECKED):
        some = lengths[first : first + CHECKED].astype(np.int64)
        ends = end + np.cumsum(some) * dtype.itemsize
        wrong = (some < 0) | (places[first : first + CHECKED] != ends - some * dtype.itemsize)
        if wrong.any():
            number = first + int(wrong.argmax())
            what = f"sequence {number} has {lengths[number]} ids from byte {places[number]} on"
            _reject(where, index, f"{what}, not after the one before it", suggestion)
        end = int(ends[-1])
    if end != total:
        _reject(
            where, data, f"has {total} bytes, and the sequences of {index.name} {end}", suggestion
        )

    def begins() -> NDArray[np.int64]:
        first = np.fromfile(index, "<i8", documents, offset=HEADER.size + 12 * sequences)
        if first[0] or first[-1] != sequences or (np.diff(first) < 0).any():
            what = f"has documents that do not divide its {sequences} sequences"
            _reject(where, index, what, suggestion)
        # A document without sequences at the end begins after the last one.
        positions: NDArray[np.int64] = (np.append(places, end) // dtype.itemsize)[first[:-1]]
        return positions

    return InPlace(np.memmap(data, dtype, "r"), documents - 1, [data], begins)


# -- Arrow ----------------------------------------------------------------------------------


def arrow(files: Sequence[Path], where: str) -> InPlace:
    """The ids of Arrow files, a row a document."""
    parts: list[NDArray[Any]] = []
    lengths: list[NDArray[np.int64]] = []
    for path in files:
        before = sum(len(some) for some in lengths)
        with _damaged(where, path):
            pyarrow = import_pyarrow()
            for batch in arrow_batches(pyarrow.memory_map(str(path))):
                if COLUMN not in batch.schema.names:
                    names = ", ".join(batch.schema.names)
                    what = f"has no column {COLUMN}, but {names}"
                    _reject(where, path, what, "prepare texts by `axsparse data prepare`")
                marks = {LABELS, *MASKS} & {*batch.schema.names}
                padding = batch.column(PADDING).flatten() if PADDING in batch.schema.names else None
                if padding is not None and pyarrow.compute.min(padding).as_py() in (0, False):
                    marks.add(f"an {PADDING} with padding")
                if marks:
                    what = f"has {', '.join(sorted(marks))}, which are not read in place"
                    _reject(where, path, what, "prepare it by `axsparse data prepare`")
                rows = batch.column(COLUMN)
                rows.validate(full=True)
                is_list = hasattr(rows, "flatten") and hasattr(rows.type, "value_type")
                ids = rows.flatten() if is_list else rows
                is_complete = is_list and pyarrow.types.is_integer(ids.type)
                if not is_complete or rows.null_count or ids.null_count:
                    row = sum(len(some) for some in lengths) - before + 1
                    what = f"has {rows.type}, or nulls, as {COLUMN} from row {row} on"
                    _reject(where, path, what, "give lists of whole numbers")
                found = ids.to_numpy(zero_copy_only=True)
                if found.size:
                    parts.append(found.view(f"<u{found.dtype.itemsize}"))
                size = pyarrow.compute.list_value_length(rows)
                some = size.to_numpy(zero_copy_only=False).astype(np.int64)
                for name in (name for name in PACKED if name in batch.schema.names):
                    some, of_rows = _documents(batch.column(name).flatten(), name), some
                    ends = np.cumsum([0, *some])
                    if not np.isin(np.cumsum(of_rows), ends).all() or ends[-1] != of_rows.sum():
                        what = f"has {name} that do not divide its rows of {COLUMN} into documents"
                        _reject(where, path, what, "pack it again, or leave the column out")
                lengths.append(some)
    types = {part.dtype for part in parts}
    if len(types) != 1:
        what = f"has ids of types {', '.join(map(str, types))}" if types else "has no ids"
        _reject(where, files[0], what, "give lists of one type of whole numbers")
    every = np.concatenate(lengths)
    return InPlace(Joined(parts), len(every), files, lambda: np.cumsum(every) - every)


def _documents(packed: Any, name: str) -> NDArray[np.int64]:
    """The lengths of documents, which a column of `PACKED` says."""
    values: NDArray[np.int64] = packed.to_numpy(zero_copy_only=False).astype(np.int64)
    if name == PACKED[0]:
        return values
    begins = np.flatnonzero(values == 0)
    return np.diff([0, *begins[begins > 0], len(values)])


def _files(folder: Path, where: str) -> list[Path]:
    path = folder / "state.json"
    with reading(f"{where}: {path}", "name a folder that save_to_disk wrote"):
        text = path.read_bytes()
    try:
        state = json.loads(text)
        names = [folder / Path(file["filename"]).name for file in state["_data_files"]]
        is_subset = bool(state.get("_indices_data_files"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        _reject(where, path, "lists no files", "save the data again by save_to_disk")
    if is_subset or not names:
        _reject(where, path, "is a selection of rows", "save it again after flatten_indices()")
    return names


@contextmanager
def _damaged(where: str, path: Path) -> Iterator[None]:
    try:
        with refusing():
            yield
    except FileNotFoundError:
        raise MissingInputError(
            f"{where}: {path} is not there; copy the folder again, or name another"
        ) from None
    except OSError as reason:
        said = reason.strerror or " ".join(str(reason).split())
        _reject(where, path, f"is no readable Arrow file ({said})", "copy it again")


def _reject(where: str, path: Path, what: str, suggestion: str) -> NoReturn:
    raise DataError(f"{where}: {path} {what}; {suggestion}")
