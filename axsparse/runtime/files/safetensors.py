"""The safetensors format: tensors by name, in one file or spread over several.

A file has 8 bytes with the length of a JSON header, then the header, which maps each name to a
type, a shape and a place in the data, and then the data. If there are several files, a JSON index
next to them says which tensor is in which: {"weight_map": {name: file}}.

The library `safetensors` maps a file into memory. Pages once read would stay resident until the
file is closed, and a file that becomes shorter meanwhile would end the process by a signal. So
files are read here, each tensor into separate memory.

For a pruned tensor NAME of n entries, k of them kept, a file may have

    NAME.values   BF16, (k,): the entries that are not zero, in row-major order
    NAME.mask     U8, (⌈n/8⌉,): bit i of byte b says whether entry 8·b + i is kept
    NAME.shape    I64, (dimensions,)

The metadata of its header has `axsparse_sparse: "1"`, the version of that form.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.errors import DataError, one_line, reading

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The bound that the format itself sets."""
DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7 and newer
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors of reading a JSON text that does not have the form of a header or an index."""
NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Matches names that JSON can express and neither files nor screens can: names with zero bytes or
halves of surrogate pairs."""
NO_PLAIN_FILE = re.compile(rf"[/\\:\0\ud800-\udfff]|(?<!{re.escape(SUFFIX)})\Z")
"""Matches names that no safetensors file in the same folder may have."""
MOST_SAID = 120


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; OSError for a pipe: opening one would wait, and signals would not
    end the wait."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return path.open("rb")


class SafetensorsFile:
    """One file; its header is read at once, and each tensor when it is asked for."""

    def __init__(self, path: Path) -> None:
        """DataError if it is of another format, or cut short; OSError if it cannot be read."""
        self.path: Path = path
        self.files: Sequence[Path] = (path,)
        with open_regular(path) as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            size = os.fstat(file.fileno()).st_size
            if first.startswith(b"PK\x03\x04"):  # a zip archive
                raise DataError(
                    f"{path}: no safetensors file, but an archive as torch.save writes them; write "
                    f"its tensors anew by safetensors.torch.save_file(torch.load({str(path)!r}), "
                    '"NEW.safetensors")'
                )
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise DataError(f"{path}: no safetensors file, or cut short; get it anew")
            text = file.read(length)
        try:
            header: dict[str, Any] = json.loads(text, object_pairs_hook=_named_once)
            metadata = header.pop("__metadata__", None)
            self._places = {name: _header_of(entry) for name, entry in header.items()}
        except MALFORMED as reason:
            said = one_line(reason)[:MOST_SAID]
            raise DataError(
                f"{path}: its safetensors header cannot be read ({said}); get it anew"
            ) from reason
        self._data = 8 + length
        if any(start + it.nbytes > size - self._data for it, start in self._places.values()):
            raise DataError(f"{path}: ends before the last of its tensors; get it anew")
        self.shapes = {name: header.shape for name, (header, _) in self._places.items()}
        self.metadata: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
        """Texts by name that the file has next to its tensors."""

    def header(self, name: str) -> TensorHeader:
        """The type and shape of a tensor; KeyError if the file does not have it."""
        return self._places[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name][0].dtype

    def read(self, name: str) -> Tensor:
        """A full tensor, which the file has to have."""
        shape = self.shapes[name]
        return self.read_part(name, 0, math.prod(shape)).view(shape)

    def read_part(self, name: str, start: int, stop: int) -> Tensor:
        """The entries [start, stop) of a tensor, flat; the tensor has to have them. DataError if
        the file has become shorter since it was opened."""
        header, first = self._places[name]
        size = header.dtype.itemsize
        assert 0 <= start <= stop <= math.prod(header.shape), "no such entries"
        buffer = bytearray((stop - start) * size)
        with self.path.open("rb") as file:
            file.seek(self._data + first + start * size)
            read = file.readinto(buffer)
        if read < len(buffer):
            raise DataError(f"{self.path}: became shorter while it was read; get it anew")
        if not buffer:
            return torch.empty(0, dtype=header.dtype)
        return torch.frombuffer(buffer, dtype=header.dtype)


def _named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; ValueError for a name that comes twice, or that is no text."""
    named: dict[str, Any] = {}
    for name, value in pairs:
        if NO_TEXT.search(name) is not None:
            raise ValueError(f"the name {name!r} is no text")
        if name in named:
            raise ValueError(f"the name {name!r} is there twice")
        named[name] = value
    return named


def _header_of(entry: Mapping[str, Any]) -> tuple[TensorHeader, int]:
    """A tensor's type and shape and its first byte in the data; one of `MALFORMED` for an entry
    that contradicts itself."""
    header = TensorHeader(DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])))
    start, stop = map(int, entry["data_offsets"])
    if start < 0 or min(header.shape, default=0) < 0 or stop - start != header.nbytes:
        raise ValueError(f"{header.shape} of {entry['dtype']} in bytes {start} to {stop}")
    return header, start


class SafetensorsIndex:
    """The tensors of all files of an index."""

    def __init__(self, path: Path) -> None:
        """DataError if it is no index, or if a file does not have the tensors of the index;
        MissingInputError if a file that it names cannot be read."""
        self.path: Path = path
        places = _weight_map(path)
        opened: dict[str, SafetensorsFile] = {}
        for file in sorted(set(places.values())):
            with reading(f"{path}: names {file}, which", "get all of the files that it names"):
                opened[file] = SafetensorsFile(path.parent / file)
        for name, file in places.items():
            if name not in opened[file].shapes:
                raise DataError(
                    f"{path}: places {name!r} in {file}, which lacks it; get all of its files anew"
                )
        self.files: Sequence[Path] = (path, *(part.path for part in opened.values()))
        self._parts = {name: opened[file] for name, file in places.items()}
        self.shapes = {name: part.shapes[name] for name, part in self._parts.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._parts[name].dtype(name)

    def read(self, name: str) -> Tensor:
        return self._parts[name].read(name)


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor; DataError if any is not a safetensors file next to the index."""
    try:
        text = path.read_bytes()
        places: object = json.loads(text, object_pairs_hook=_named_once)["weight_map"]
    except MALFORMED as reason:
        raise DataError(
            f"{path}: no index of safetensors files ({one_line(reason)[:MOST_SAID]}); get it anew"
        ) from reason
    if not isinstance(places, dict):
        raise DataError(
            f"{path}: its weight_map is {type(places).__name__}, not tensors and files; get it anew"
        )
    for name, file in places.items():
        # Path(file).name would not do, since systems differ in the separator of folders.
        if not isinstance(file, str) or NO_PLAIN_FILE.search(file) is not None:
            raise DataError(
                f"{path}: places {name!r} in {file!r}, which is no safetensors file beside it; get "
                "the index from someone you trust"
            )
    return places


@dataclass(frozen=True)
class TensorHeader:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def can_be_stored(tensor: Tensor) -> bool:
    """Whether a file can hold a tensor like this one, by its type and layout."""
    return tensor.layout == torch.strided and tensor.dtype in _NAMES


def header_of(tensor: Tensor) -> TensorHeader:
    return TensorHeader(tensor.dtype, tuple(tensor.shape))


def write_safetensors(
    path: Path,
    headers: Mapping[str, TensorHeader],
    tensors: Iterator[Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    written: Callable[[bytes | memoryview], object] = len,
) -> None:
    """Write a new file, which is on the disk once this returns; OSError if that fails.

    `tensors` come in the order of `headers` and have the types and shapes that it says; none is
    held while the next is made. `metadata` are texts by name to be written into the header.
    `written` is called with every piece of the file in turn, for example to compute a hash.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, tensor in headers.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (at, at + tensor.nbytes),
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8 bytes
    with path.open("xb") as file:
        head = len(text).to_bytes(8, "little") + text
        file.write(head)
        written(head)
        for tensor_header in headers.values():
            contents = _contents(next(tensors), tensor_header)
            file.write(contents)
            written(contents)
        file.flush()
        os.fsync(file.fileno())


def _contents(tensor: Tensor, tensor_header: TensorHeader) -> memoryview:
    assert tensor_header == header_of(tensor)
    return bytes_of(tensor).numpy().data


SPARSE_FILE = f"sparse{SUFFIX}"
VERSION_KEY, VERSION = "axsparse_sparse", "1"
VALUES, MASK, SHAPE = ".values", ".mask", ".shape"


class SparseFile:
    """A `WeightFile` of such tensors; each is expanded when it is read."""

    def __init__(self, path: Path) -> None:
        """DataError if the file is of another format, cut short or damaged; OSError if it cannot
        be read."""
        self._file = SafetensorsFile(path)
        self.path: Path = path
        self.files: Sequence[Path] = (path,)
        self.metadata = self._file.metadata
        version = self.metadata.get(VERSION_KEY)
        if version != VERSION:
            raise DataError(
                f"{path}: its {VERSION_KEY} is {version!r}, and this version reads {VERSION!r}; "
                "write it anew by axsparse export --to sparse"
            )
        stored = self._file.shapes
        self._kept = _kept(stored)
        parts = {name + part for name in self._kept for part in (VALUES, MASK, SHAPE)}
        self.shapes = {name: shape for name, shape in stored.items() if name not in parts}
        self.shapes |= {name: self._shape(name) for name in sorted(self._kept)}

    def _shape(self, name: str) -> tuple[int, ...]:
        values, mask, sizes = (self._file.header(name + part) for part in (VALUES, MASK, SHAPE))
        is_real = values.dtype.is_floating_point and values.dtype.itemsize > 1
        has_types = is_real and (mask.dtype, sizes.dtype) == (torch.uint8, torch.int64)
        if has_types and len(sizes.shape) == 1:
            shape = tuple(self._file.read(f"{name}{SHAPE}").tolist())
            nbytes = -(-math.prod(shape) // 8)
            if min(shape, default=0) >= 0 and mask.shape == (nbytes,):
                return shape
        raise self._damaged(name)

    def _damaged(self, name: str) -> DataError:
        return DataError(f"{self.path}: values, mask and shape of {name!r} disagree; get it anew")

    def dtype(self, name: str) -> torch.dtype:
        return self._file.dtype(name + VALUES if name in self._kept else name)

    def read(self, name: str) -> Tensor:
        """A full tensor, which the file has to have; DataError if its parts disagree."""
        if name not in self._kept:
            return self._file.read(name)
        shape = self.shapes[name]
        packed = self._file.read(f"{name}{MASK}").numpy()
        bits = np.unpackbits(packed, bitorder="little", count=math.prod(shape))
        mask_D = torch.from_numpy(bits).bool()
        values_K = self._file.read(f"{name}{VALUES}")
        if values_K.dim() != 1 or len(values_K) != int(mask_D.sum()):
            raise self._damaged(name)
        dense_D = torch.zeros(mask_D.shape, dtype=values_K.dtype)
        return dense_D.masked_scatter_(mask_D, values_K).view(shape)


Stored = tuple[TensorHeader, Callable[[], Tensor]]
"""The header of a tensor in a file, and what makes it."""


def sparse_tensors(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The stored form of tensors, in bf16: the parts of each one that is smaller as its parts. Each
    tensor is read once now, and each of its parts reads it again."""
    stored: dict[str, Stored] = {}
    for name, (header, read) in tensors.items():
        if not header.dtype.is_floating_point:
            stored[name] = header, read
            continue
        kept, size = int((_rounded(read) != 0).sum()), math.prod(header.shape)
        if len(header.shape) < 2 or 2 * kept + size // 8 >= 2 * size:
            stored[name] = TensorHeader(torch.bfloat16, header.shape), partial(_rounded, read)
            continue
        nbytes, shape = -(-size // 8), torch.tensor(header.shape)
        stored[name + VALUES] = TensorHeader(torch.bfloat16, (kept,)), partial(_values, read)
        stored[name + MASK] = TensorHeader(torch.uint8, (nbytes,)), partial(_mask, read)
        stored[name + SHAPE] = header_of(shape), shape.clone
    return stored


def _rounded(read: Callable[[], Tensor]) -> Tensor:
    return read().to(torch.bfloat16)


def _values(read: Callable[[], Tensor]) -> Tensor:
    dense = _rounded(read)
    return dense[dense != 0]


def _mask(read: Callable[[], Tensor]) -> Tensor:
    bits = (_rounded(read) != 0).flatten().numpy()
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def is_sparse(names: Collection[str]) -> bool:
    """Whether tensors of these names are what `sparse_tensors` returns of a pruned model."""
    return bool(_kept(names))


def _kept(names: Collection[str]) -> set[str]:
    """The names of tensors of which all parts are there."""
    named = {name.removesuffix(VALUES) for name in names if name.endswith(VALUES)}
    return {name for name in named if name + MASK in names and name + SHAPE in names}
