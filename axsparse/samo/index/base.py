"""Which entries of a tensor are kept, and how to move values between dense and kept form.

All encodings give the same bits; they differ in bytes (`samo/state_bytes.py`) and in time
(docs/decisions/009-index-encodings.md).

Shape suffixes: `_D` is a dense flat tensor of `(numel,)` (every entry), `_K` a tensor of kept
entries only, in ascending position. `start` and `stop` are numbers of kept entries, from 0.

Adding an index encoding:
  1. Write a class of `Index`, built from a flat boolean mask (`MaskIndex` is an example).
  2. Add its name to `IndexKind` and `Encoding`, and its bytes to `index_bytes`, in
     `samo/state_bytes.py`, and its name to the setting `samo.index` in `config/schema.py`.
  3. Build it in `make_index` below; for GPUs in `make_device_index` of
     `samo/cuda/device_index.py`, with a decoder in `samo/cuda/source/index.cuh`.
  4. `tests/samo/index/test_index.py` runs every `IndexKind`; it, `tests/samo/test_state_bytes.py`
     and `tests/samo/cuda/test_kernels_emulated.py` must pass.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import DeviceIndex
from axsparse.samo.host.compiled_loops import FEW, Array, Loop, can_compile
from axsparse.samo.precision import array_of
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASK_BLOCK, MASK_WORD, IndexKind, encoding_of, fits_int32

DIVIDE, DIVIDE_BITS, EXPAND_BITS, MOVE_BITS = (
    Loop("axsparse.samo.index.mask_loops", name)
    for name in ("divide", "divide_bits", "expand_bits", "move_bits")
)


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

    @property
    def nbytes(self) -> int:
        """Bytes of storage, exactly as `state_bytes.index_bytes` says."""

    @property
    def on_device(self) -> DeviceIndex | None:
        """This index as kernels read it; None if it is read on the host."""

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        """The kept entries [start, stop) of a dense flat tensor, `(stop - start,)`; may be a view
        of it, so whoever changes the result must copy it before."""

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        """Write values to the kept entries [start, start + len(values_K)) of `dense_D`, in place;
        all other entries stay as they are. Both tensors have the same dtype."""

    def positions(self) -> Tensor:
        """The flat positions of all kept entries, `(kept,)`, int64, ascending. Takes 8 bytes an
        entry, so it is for masks and files and not for steps."""


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
        self.kept, self.nbytes = self._positions.numel(), self._positions.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        return dense_D.index_select(0, self._positions[start:stop])

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        positions = self._positions[start : start + values_K.numel()]
        # In blocks, since index_copy_ takes positions of int64: half the time of index_put_.
        for some, values in zip(positions.split(BLOCK), values_K.split(BLOCK), strict=True):
            dense_D.index_copy_(0, some.long(), values)

    def positions(self) -> Tensor:
        return self._positions.long()

    def csr(self, width: int) -> tuple[Array, Array]:
        """The kept entries as entries of a matrix that is `width` wide, row by row: the column of
        each, int32 `(kept,)`, and for each row the number of kept entries up to its end, int64.

        These are the column indices of the CSR format and its row pointers without the first, 0.
        Needs numba.
        """
        return _csr(DIVIDE, self._positions.numpy(), width, (self._numel, self.kept))


class MaskIndex:
    """A bit for each dense entry, the lowest of a byte first, and the number of kept entries before
    each block.

    Without a compiler numpy decodes positions, which takes some four times as long, and 8 bytes for
    each entry that moves.
    """

    on_device = None

    def __init__(self, mask_D: Tensor) -> None:
        self._numel = mask_D.numel()
        self._offsets = _block_offsets(mask_D)
        self.kept = int(self._offsets[-1])
        bits = np.zeros(-(-self._numel // MASK_WORD) * MASK_WORD // 8, dtype=np.uint8)
        bits[: -(-self._numel // 8)] = np.packbits(mask_D.numpy(), bitorder="little")
        self._bits = torch.from_numpy(bits)
        self.nbytes = self._bits.nbytes + self._offsets.nbytes

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        if not self._has_loop():
            return dense_D.index_select(0, self._decoded(start, stop))
        gathered_K = dense_D.new_empty(stop - start)
        self._move(dense_D, gathered_K, start, into_dense=False)
        return gathered_K

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        if self._has_loop():
            self._move(dense_D, values_K, start, into_dense=True)
        else:
            dense_D.index_copy_(0, self._decoded(start, start + values_K.numel()), values_K)

    def expand(self, values_K: Tensor, dense_D: Tensor) -> bool:
        """Write all kept entries, and 0 to all others, in one pass: values in the type of
        `dense_D`, or fp32 ones that are rounded to bf16. Returns False, having done nothing, where
        there is no compiled loop for it."""
        rounds = (values_K.dtype, dense_D.dtype) == (torch.float32, torch.bfloat16)
        if not self._has_loop() or not (rounds or values_K.dtype == dense_D.dtype):
            return False
        assert values_K.shape == (self.kept,), f"{tuple(values_K.shape)} for {self.kept} values"
        assert dense_D.shape == (self._numel,), f"{tuple(dense_D.shape)} for {self._numel} entries"
        scratch = dense_D.new_empty(MASK_BLOCK + MASK_WORD)
        arrays = (array_of(each) for each in (self._offsets, values_K, dense_D, scratch))
        EXPAND_BITS(self._words(), *arrays)
        return True

    def positions(self) -> Tensor:
        return self._decoded(0, self.kept)

    def csr(self, width: int) -> tuple[Array, Array]:
        """See `Int32Index.csr`."""
        return _csr(DIVIDE_BITS, self._words(), width, (self._numel, self.kept))

    def _words(self) -> Array:
        words: Array = self._bits.numpy().view("<u8")
        return words

    def _blocks_of(self, start: int, stop: int) -> range:
        """The blocks that contain the kept entries [start, stop)."""
        offsets = self._offsets.numpy()
        first = np.searchsorted(offsets, offsets.dtype.type(start), side="right") - 1
        last = np.searchsorted(offsets, offsets.dtype.type(stop), side="left")
        return range(int(first), int(last))

    def _has_loop(self) -> bool:
        return self._numel > FEW and can_compile()

    def _move(self, dense_D: Tensor, values_K: Tensor, start: int, *, into_dense: bool) -> None:
        """Move values by a compiled loop. A loop checks nothing, so the checks are here."""
        assert dense_D.dtype == values_K.dtype, f"{dense_D.dtype} and {values_K.dtype}"
        assert dense_D.shape == (self._numel,), f"{tuple(dense_D.shape)} for {self._numel} entries"
        assert values_K.ndim == 1, f"{values_K.ndim} dimensions"
        most = self.kept - start
        assert values_K.numel() <= most, f"{values_K.numel()} values for {most} kept entries"
        dense, values = array_of(dense_D), array_of(values_K)
        block = self._blocks_of(start, start + values.size).start
        before = start - int(self._offsets[block])
        word = block * (MASK_BLOCK // MASK_WORD)
        MOVE_BITS(self._words(), word, before, dense, values, int(into_dense))

    def _decoded(self, start: int, stop: int) -> Tensor:
        """The positions of the kept entries [start, stop), int64."""
        blocks = self._blocks_of(start, stop)
        packed = self._bits.numpy()[blocks.start * MASK_BLOCK // 8 : blocks.stop * MASK_BLOCK // 8]
        kept = np.unpackbits(packed, bitorder="little").view(np.bool_)
        before = int(self._offsets[blocks.start])
        positions = np.flatnonzero(kept)[start - before : stop - before]
        positions += blocks.start * MASK_BLOCK
        return torch.from_numpy(positions)


def _block_offsets(mask_D: Tensor) -> Tensor:
    """The number of kept entries before each block of dense positions, and at the end the total,
    `(blocks + 1,)`; int32 where that fits, otherwise int64."""
    mask = mask_D.numpy()
    complete = mask[: mask.size // MASK_BLOCK * MASK_BLOCK].reshape(-1, MASK_BLOCK)
    before = np.zeros(-(-mask.size // MASK_BLOCK) + 1, dtype=np.int64)
    before[1 : len(complete) + 1] = complete.sum(1)
    if complete.size < mask.size:
        before[-1] = mask[complete.size :].sum()
    np.cumsum(before, out=before)
    return torch.from_numpy(before.astype(np.int32) if fits_int32(int(before[-1])) else before)


def _csr(loop: Loop, entries: Array, width: int, size: tuple[int, int]) -> tuple[Array, Array]:
    """`Int32Index.csr` by a loop over positions or bits; `size` is (all entries, kept entries)."""
    assert can_compile(), "numba is missing"
    numel, kept = size
    columns, ends = np.empty(kept, dtype=np.int32), np.empty(numel // width, dtype=np.int64)
    loop(entries, width, columns, ends)
    return columns, ends


def host_positions(index: Index) -> Tensor:
    """`index.positions()` on the host, without a kernel, for a thread next to training."""
    on_device = index.on_device
    return index.positions() if on_device is None else on_device.positions(torch.device("cpu"))


def make_index(mask_D: Tensor, kind: IndexKind = "int32") -> Index:
    """The index of a flat boolean mask (True: kept).

    A mask that keeps everything becomes a `FullIndex`, whatever `kind` says. Raises ConfigError
    where `encoding_of` does.
    """
    numel, kept = mask_D.numel(), int(mask_D.count_nonzero())
    if kept == numel:
        return FullIndex(numel)
    return Int32Index(mask_D) if encoding_of(numel, kept, kind) == "int32" else MaskIndex(mask_D)
