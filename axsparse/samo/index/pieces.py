"""What encodings share that are decoded while they are read: offsets of blocks, and pieces.

Such an index cuts the dense tensor into blocks and stores how many kept entries come before each,
so that reading can start at any kept entry. It decodes its positions a piece at a time, so that
temporaries do not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import Array, Loop, can_compile
from axsparse.samo.state_bytes import fits_int32

PIECE = 65_536
"""Entries of a piece, for some hundred kB: kept ones, or dense ones where bits are decoded."""

FEW = 1 << 15
"""Up to this number of entries a tensor is moved by numpy: it is as
fast there, and a small model loads no compiled loops."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by its bytes."""
Pieces: TypeAlias = Iterable[tuple[int, Tensor]]
"""For each piece the number of its first kept entry, and its flat positions, int32 or int64. The
next piece may overwrite them: fresh memory for each piece would double the time."""


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bounds of pieces of kept entries."""
    for begin in range(start, stop, PIECE):
        yield begin, min(begin + PIECE, stop)


def block_offsets(mask_D: Tensor, block: int) -> Tensor:
    """The number of kept entries before each block of dense positions, and at the end that of all,
    `(blocks + 1,)`; int32 where that fits, otherwise int64."""
    mask = mask_D.numpy()
    before = np.zeros(-(-mask.size // block) + 1, dtype=np.int64)
    assert PIECE % block == 0
    for start in range(0, mask.size, PIECE):  # reduceat converts all of its input to integers
        part = mask[start : start + PIECE]
        counts = np.add.reduceat(part, np.arange(0, part.size, block), dtype=np.int64)
        before[start // block + 1 :][: counts.size] = counts
    np.cumsum(before, out=before)
    return torch.from_numpy(before.astype(np.int32) if fits_int32(int(before[-1])) else before)


def covering(offsets: Array, start: int, stop: int) -> range:
    """The blocks that contain the kept entries [start, stop)."""
    first = np.searchsorted(offsets, offsets.dtype.type(start), side="right") - 1
    last = np.searchsorted(offsets, offsets.dtype.type(stop), side="left")
    return range(int(first), int(last))


def gather(dense_D: Tensor, pieces: Pieces, start: int, stop: int) -> Tensor:
    """The entries [start, stop) at the positions of the pieces."""
    gathered_K = dense_D.new_empty(stop - start)
    for first, positions in pieces:
        part = gathered_K[first - start : first - start + positions.numel()]
        torch.index_select(dense_D, 0, positions, out=part)
    return gathered_K


def scatter(dense_D: Tensor, pieces: Pieces, values_K: Tensor, start: int) -> None:
    """Write values, of which the first is kept entry `start`, to the positions of the pieces."""
    for first, positions in pieces:
        part = values_K[first - start : first - start + positions.numel()]
        # Half the time of index_put_, which takes int32 but converts it as well.
        dense_D.index_copy_(0, positions.long(), part)


def collect(pieces: Pieces, kept: int) -> Tensor:
    """The positions of all pieces in one tensor, int64."""
    positions = torch.empty(kept, dtype=torch.int64)
    for first, part in pieces:
        positions[first : first + part.numel()] = part
    return positions


def empty_csr(numel: int, kept: int, width: int) -> tuple[Array, Array]:
    """Arrays for the columns of all kept entries, and for the number of the entry at which each row
    of a matrix `width` wide ends."""
    return np.empty(kept, dtype=np.int32), np.empty(numel // width, dtype=np.int64)


def same_size_integers(
    dense_D: Tensor, values_K: Tensor, numel: int, most: int
) -> tuple[Array, Array]:
    """Both tensors as arrays of integers of the same bits, since numpy has no bf16.

    Compiled loops check nothing, so this does: `dense_D` has `numel` entries, and `values_K` has at
    most `most` of the same type.
    """
    assert dense_D.dtype == values_K.dtype, f"{dense_D.dtype} and {values_K.dtype}"
    assert dense_D.shape == (numel,), f"{tuple(dense_D.shape)} for {numel} entries"
    assert values_K.ndim == 1, f"{values_K.ndim} dimensions"
    assert values_K.numel() <= most, f"{values_K.numel()} values for {most} kept entries"
    dtype = INTEGERS[dense_D.itemsize]
    return dense_D.view(dtype).numpy(), values_K.view(dtype).numpy()


def compiled(loop: Loop) -> Loop | None:
    """A compiled loop; None if loops cannot be compiled here."""
    return loop if can_compile() else None
