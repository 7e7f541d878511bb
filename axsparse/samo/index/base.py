"""Which entries of a tensor are kept, and how to move values between dense and kept form.

All encodings give the same bits; they differ in bytes (`samo/state_bytes.py`) and in time
(docs/decisions/009-index-encodings.md).

Shape suffixes: `_D` is a dense flat tensor of `(numel,)` (every entry), `_K` a tensor of kept
entries only, in ascending position. `start` and `stop` are numbers of kept entries, from 0.

Adding an index encoding:
  1. Write a class of `Index` in a file of its own in `samo/index/`, built from a flat boolean mask
     (`bitmask.py` is an example; `pieces.py` has what encodings share).
  2. Add its name to `IndexKind` and `Encoding`, and its bytes to `index_bytes`, in
     `samo/state_bytes.py`, and its name to the setting `samo.index` in `config/schema.py`.
  3. Build it in `make_index` below; for GPUs in `make_device_index` of
     `samo/cuda/device_index.py`, with a decoder in `samo/cuda/source/index.cuh`.
  4. `tests/samo/index/test_index.py` runs every `IndexKind`; it, `tests/samo/test_state_bytes.py`
     and `tests/samo/cuda/test_kernels_emulated.py` must pass.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from axsparse.runtime.errors import ConfigError
from axsparse.samo.cuda.device_index import DeviceIndex
from axsparse.samo.host.compiled_loops import Array, Loop
from axsparse.samo.index.bitmask import MaskIndex
from axsparse.samo.index.pieces import Pieces, compiled, cut, empty_csr, scatter
from axsparse.samo.state_bytes import INT32_LIMIT, IndexKind, encoding_of, fits_int32

DIVIDE = Loop("axsparse.samo.index.mask_loops", "divide")


class Index(Protocol):
    """The kept positions of one tensor, shared by all of its compressed states.

    An index never changes: a tensor that is pruned further gets a new one. It works for values of
    every dtype, moves their bits unchanged, and holds for any `start` and `stop` in [0, kept],
    since updates read blocks of entries and replicas hold parts of them. Its tensors are on the
    device of the values.

        index = make_index(torch.tensor([True, False, True]))
        index.gather(torch.tensor([5.0, 6.0, 7.0]), 0, 2)      # tensor([5., 7.])
    """

    @property
    def kept(self) -> int:
        """The number of kept entries."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of storage, exactly those of `state_bytes.index_bytes`."""
        ...

    @property
    def on_device(self) -> DeviceIndex | None:
        """This index as kernels read it; None if it is read on the host."""
        ...

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        """The kept entries [start, stop) of a dense flat tensor, `(stop - start,)`; may be a view
        of it, so whoever changes the result must copy it before."""
        ...

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        """Write values to the kept entries [start, start + len(values_K)) of `dense_D`, in place;
        all other entries stay as they are. Both tensors have the same dtype."""
        ...

    def positions(self) -> Tensor:
        """The flat positions of all kept entries, `(kept,)`, int64, ascending. Takes 8 bytes an
        entry, so it is for masks and files and not for steps."""
        ...


class FullIndex:
    """The index of a dense tensor, of which every entry is kept; it stores nothing."""

    nbytes = 0
    on_device = None

    def __init__(self, numel: int) -> None:
        self.kept = numel

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        return dense_D[start:stop]

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        dense_D[start : start + values_K.numel()].copy_(values_K)

    def positions(self) -> Tensor:
        return torch.arange(self.kept)


class Int32Index:
    """The paper's index: one int32 flat position a kept entry."""

    on_device = None

    def __init__(self, mask_D: Tensor) -> None:
        self._numel = mask_D.numel()
        self._positions = mask_D.nonzero().view(-1).to(torch.int32)

    @property
    def kept(self) -> int:
        return self._positions.numel()

    @property
    def nbytes(self) -> int:
        return self._positions.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        return dense_D.index_select(0, self._positions[start:stop])

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        stop = start + values_K.numel()
        pieces: Pieces = ((begin, self._positions[begin:end]) for begin, end in cut(start, stop))
        scatter(dense_D, pieces, values_K, start)

    def positions(self) -> Tensor:
        return self._positions.long()

    def csr(self, width: int) -> tuple[Array, Array]:
        """The kept entries as those of a matrix that is `width` wide, row by row: the column of
        each, int32 `(kept,)`, and for each row the number of kept entries up to its end, int64.

        These are the column indices of the CSR format and its row pointers without the first, 0.
        Needs numba.
        """
        columns, ends = empty_csr(self._numel, self.kept, width)
        loop = compiled(DIVIDE)
        assert loop is not None, "numba is missing"
        loop(self._positions.numpy(), width, columns, ends)
        return columns, ends


def host_positions(index: Index) -> Tensor:
    """`index.positions()` on the host without a kernel, for a thread beside the one that trains."""
    on_device = index.on_device
    return index.positions() if on_device is None else on_device.positions_by_host()


def make_index(mask_D: Tensor, kind: IndexKind = "int32") -> Index:
    """The index of a flat boolean mask (True: kept).

    A mask that keeps everything becomes a `FullIndex`, whatever `kind` says. Raises ConfigError
    if `kind` is int32 and the tensor has more entries than int32 can number.
    """
    if kind == "int32" and not fits_int32(mask_D.numel()):
        raise ConfigError(
            f"samo.index: int32 numbers {INT32_LIMIT} entries of a tensor and this one has "
            f"{mask_D.numel()}; choose mask or auto"
        )
    numel, kept = mask_D.numel(), int(mask_D.count_nonzero())
    if kept == numel:
        return FullIndex(numel)
    return Int32Index(mask_D) if encoding_of(numel, kept, kind) == "int32" else MaskIndex(mask_D)
