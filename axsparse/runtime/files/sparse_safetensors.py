"""Pruned tensors in a safetensors file: the values of their kept entries, and one bit an entry.

For a tensor NAME of n entries that is stored so, the file has

    NAME.values   BF16, (kept,): the entries that are not zero, in row-major order
    NAME.mask     U8, (⌈n/8⌉,): bit i of byte b says whether entry 8·b + i is kept
    NAME.shape    I64, (dimensions,)

which takes 2·k + n/8 bytes. Any other tensor is there under its own name. The metadata of the
header has `axsparse_sparse: "1"`, the version of the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from axsparse.runtime.errors import DataError
from axsparse.runtime.files.safetensors import (
    SUFFIX,
    SafetensorsFile,
    TensorHeader,
    header_of,
)

SPARSE_FILE = f"sparse{SUFFIX}"
"""The name of such a file in a folder."""
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
        kept = {name.removesuffix(VALUES) for name in stored if name.endswith(VALUES)}
        parts = {name + part for name in kept for part in (VALUES, MASK, SHAPE)}
        self._kept = kept
        self.shapes: dict[str, tuple[int, ...]] = {
            name: shape for name, shape in stored.items() if name not in parts
        }
        for name in sorted(kept):
            self.shapes[name] = self._shape(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        stored = self._file.shapes
        if f"{name}{SHAPE}" in stored and f"{name}{MASK}" in stored:
            shape = tuple(self._file.read(f"{name}{SHAPE}").tolist())
            nbytes = -(-math.prod(shape) // 8)
            if min(shape, default=0) >= 0 and stored[f"{name}{MASK}"] == (nbytes,):
                return shape
        raise self._damaged(name)

    def _damaged(self, name: str) -> DataError:
        return DataError(f"{self.path}: values, mask and shape of {name!r} disagree; get it anew")

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor, which the file has to have."""
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
    """The stored form of tensors, in bf16: the parts of each one that is smaller as its parts.

    Each tensor is read once now, and each of its parts reads it again.
    """
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
    return any(name.endswith(MASK) and name.removesuffix(MASK) + VALUES in names for name in names)
