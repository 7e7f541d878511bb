"""Indices that are decoded as they are used: offsets to start in the middle, and bounded pieces.

Such an index cuts the dense tensor into blocks of positions and knows how many kept
entries come before each. It hands out its positions a piece at a time, so that no
temporary grows with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.samo.state_bytes import fits_int32

PIECE = 65_536
"""Kept entries, or dense ones for the decoding of bits, in a piece: some hundred kB."""

Array: TypeAlias = NDArray[Any]
Pieces: TypeAlias = Iterable[tuple[int, Tensor]]
"""The number of the first kept entry, and the flat positions from there on, int32 or int64,
which the next piece may overwrite: fresh memory for each would double the time."""


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bounds of pieces of kept entries."""
    for begin in range(start, stop, PIECE):
        yield begin, min(begin + PIECE, stop)


def read_dtype(numel: int) -> type[np.signedinteger[Any]]:
    """Of positions to gather from: the smaller one where it fits. Scattering takes int64."""
    return np.int32 if fits_int32(numel) else np.int64


def block_offsets(mask_D: Tensor, block: int) -> Tensor:
    """Kept entries before each block of dense positions, and all of them at the end."""
    mask = mask_D.numpy()
    before = np.zeros(-(-mask.size // block) + 1, dtype=np.int64)
    assert PIECE % block == 0
    for start in range(0, mask.size, PIECE):  # reduceat makes integers of all that it is given
        part = mask[start : start + PIECE]
        counts = np.add.reduceat(part, np.arange(0, part.size, block), dtype=np.int64)
        before[start // block + 1 :][: counts.size] = counts
    np.cumsum(before, out=before)
    return torch.from_numpy(before.astype(np.int32) if fits_int32(int(before[-1])) else before)


def covering(offsets: Array, start: int, stop: int) -> range:
    """The blocks in which the kept entries [start, stop) stand."""
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
