"""A pruned matrix as its kept entries, and its products with a few tokens.

While a language model decodes, each weight is read once for every token, so that a layer takes as
long as its bytes take to read. Of a matrix with n entries, k of them kept, two encodings are known,
and the one of fewer bytes is taken:

    mask   2·k + n/8 + 2·(rows + 2)    bf16 values, one bit an entry, two rows in turn by 64 columns
    list   3·k + 4·(rows + 1)          bf16 values, the distance to the last kept column (1 byte)

that is for each entry, f = k/n: 2·f + 1/8 or 3·f bytes beside the 2 of dense bf16. The list is
smaller below f = 1/8; a distance above 255 takes entries of value zero in between.

Up to `MOST_TOKENS` tokens are multiplied from the kept entries, by loops that add in fp32 and round
once. More, such as a prompt, are multiplied `MOST_TOKENS` at a time, or with the expanded matrix
where the processor is quick at that.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from axsparse.samo.host.compiled_loops import (
    AVX2,
    AVX512,
    Array,
    Loop,
    can_compile,
    cpu_features,
    has_bf16_loops,
)

Encoding = Literal["mask", "list"]
MULTIPLY_MASKED, MULTIPLY_LISTED = (
    Loop("axsparse.samo.host.decode_loops", name) for name in ("multiply_masked", "multiply_listed")
)
MOST_TOKENS = 16
"""Tokens that are multiplied at once from the kept entries."""
WORD = 64
"""Columns of a word of the mask."""
ROWS = 2
"""Rows whose words and values take turns."""
GROUP = 4
"""Entries of a list that are multiplied in one round; rows are filled up with zeros."""
LONGEST_STEP = 255
"""The largest distance from one entry of a list to the next."""
SPARE = 32
"""Values that loops may read before the first one and behind the last one."""
SHARED_ENTRIES = 1 << 20
"""Entries of a matrix from which on several threads share its rows."""


class KeptMatrix:
    """The kept entries of a matrix `(rows, columns)`, in bf16; the others are zero."""

    def __init__(self, dense: Tensor) -> None:
        """The entries of a matrix on the CPU that are not zero once they are bf16."""
        self.shape = rows, columns = dense.shape
        bits_D = dense.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        mask_D = bits_D << 1 != 0
        kept = int(mask_D.sum())
        self.encoding: Encoding = "list" if 3 * kept < 2 * kept + mask_D.size // 8 else "mask"
        if self.encoding == "list":
            values, self._where, lengths = _list_of(mask_D, bits_D[mask_D])
        else:
            bits, mask = (_in_pairs(array) for array in (bits_D, mask_D))
            values = bits[mask]
            self._where = np.packbits(mask, axis=-1, bitorder="little").view(np.uint64)
            lengths = mask.sum(axis=(1, 2, 3))
        self._values = np.pad(values, SPARE)
        self._first = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=self._first[1:])
        held = self._values[SPARE:], self._where, self._first
        addresses = [array.ctypes.data for array in held]
        self._about = np.array([*addresses, rows, columns], np.int64)
        self._address = self._about.ctypes.data
        self._scratch = MOST_TOKENS * (1 + columns + WORD)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._values.nbytes + self._where.nbytes + self._first.nbytes

    def dense(self) -> Tensor:
        """The matrix in bf16, with its zeros."""
        rows, columns = self.shape
        if self.encoding == "mask":
            mask = np.unpackbits(self._where.view(np.uint8), axis=-1, bitorder="little")
            pairs = np.zeros(mask.shape, np.uint16)
            pairs[mask.view(bool)] = self._values[SPARE:-SPARE]
            lines = pairs.transpose(0, 2, 1, 3).reshape(len(pairs) * ROWS, -1)
            dense = np.ascontiguousarray(lines[:rows, :columns])
        else:
            dense = np.zeros((rows, columns), np.uint16)
            lengths = np.diff(self._first)
            ends = np.cumsum(self._where, dtype=np.int64)
            before = np.concatenate([[0], ends])[self._first[:-1]]
            column = ends - np.repeat(before, lengths) - 1
            row = np.repeat(np.arange(rows), lengths)
            # What fills a list up is zero and may stand where an entry is: the entry goes last.
            values = self._values[SPARE:-SPARE]
            given = values != 0
            dense[row[given], column[given]] = values[given]
        return torch.from_numpy(dense.view(np.int16)).view(torch.bfloat16)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x Wᵀ + bias`, `(…, rows)` in the type of `x`, of `x`, `(…, columns)`.

        Products are added in fp32 and rounded once. Nothing is recorded for a backward, but for
        the bias.
        """
        rows, columns = self.shape
        tokens = x.numel() // columns if columns else 0
        kind = x.dtype
        if not tokens or not has_loops() or (tokens > MOST_TOKENS and multiplies_dense(kind)):
            return functional.linear(x, self.dense().to(kind), bias)
        if tokens > MOST_TOKENS:
            parts = x.reshape(tokens, columns).split(MOST_TOKENS)
            products = torch.cat([self.multiply(part, bias) for part in parts])
            return products.view(*x.shape[:-1], rows)
        if bias is not None:
            is_recorded = bias.requires_grad and torch.is_grad_enabled()
            if bias.dtype is not kind or is_recorded or not bias.is_contiguous():
                return (self.multiply(x.float()) + bias).to(kind)
        is_bf16 = kind is torch.bfloat16
        if not is_bf16 and kind is not torch.float32:
            return self.multiply(x.float(), None if bias is None else bias.float()).to(kind)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], rows))
        at = 0 if bias is None else bias.data_ptr()
        numbers = x.data_ptr(), at, out.data_ptr(), is_bf16, tokens, self._address
        threads = torch.get_num_threads() if rows * columns >= SHARED_ENTRIES else 1
        if threads == 1:
            self._multiply_rows(numbers, 0, rows)
            return out
        bounds = [rows * number // threads // ROWS * ROWS for number in range(threads)] + [rows]
        others = [
            _workers(threads - 1).submit(self._multiply_rows, numbers, *part)
            for part in list(pairwise(bounds))[1:]
        ]
        self._multiply_rows(numbers, *bounds[:2])
        for other in others:
            other.result()
        return out

    def _multiply_rows(self, numbers: tuple[int, ...], begin: int, end: int) -> None:
        """Compute rows, by the loop for this encoding."""
        scratch = _SCRATCH.of(self._scratch)
        loop = MULTIPLY_MASKED if self.encoding == "mask" else MULTIPLY_LISTED
        loop.of_numbers(9)(*numbers, scratch, begin, end)


class _Scratch(threading.local):
    """Memory for the tokens in fp32, which all products of one thread use."""

    held, address = np.empty(0, np.float32), 0

    def of(self, size: int) -> int:
        """The address of memory for so many numbers."""
        if size > self.held.size:
            self.held = np.empty(size, np.float32)
            self.address = self.held.ctypes.data
        return self.address


_SCRATCH = _Scratch()


@cache
def _workers(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="axsparse-rows")


@cache
def has_loops() -> bool:
    """Whether loops over kept entries can be compiled here, for vectors of the processor."""
    return can_compile() and (cpu_features() >= AVX2 or cpu_features() >= AVX512)


@cache
def multiplies_dense(dtype: torch.dtype) -> bool:
    """Whether a dense product with many tokens is as quick as one with kept entries: in bf16, only
    on processors that multiply it."""
    return dtype is not torch.bfloat16 or has_bf16_loops()


def _in_pairs(array_D: Array) -> Array:
    """The entries of a matrix in the order of its words: `(pairs of rows, words, 2, 64)`."""
    rows, columns = array_D.shape
    padded: Array = np.pad(array_D, ((0, -rows % ROWS), (0, -columns % WORD)))
    shape = -(-rows // ROWS), ROWS, -(-columns // WORD), WORD
    in_pairs: Array = padded.reshape(shape).swapaxes(1, 2)
    return in_pairs


def _list_of(mask_D: Array, bits_K: Array) -> tuple[Array, Array, Array]:
    """The values, the distances and the length of each row's list."""
    rows = len(mask_D)
    row, column = np.nonzero(mask_D)
    last = np.concatenate([[-1], column[:-1]])
    last[np.concatenate([[True], row[1:] != row[:-1]])[: row.size]] = -1
    step = column - last
    between = (step - 1) // LONGEST_STEP
    """Entries of value zero before each kept one."""
    each = 1 + between
    lengths = np.bincount(row, weights=each, minlength=rows).astype(np.int64)
    filled = -(-lengths // GROUP) * GROUP
    begins = np.concatenate([[0], np.cumsum(filled)])
    values = np.zeros(begins[-1], np.uint16)
    steps = np.zeros(begins[-1], np.uint8)
    within = np.cumsum(each) - np.concatenate([[0], np.cumsum(lengths)])[row]
    place = begins[row] + within - 1
    values[place] = bits_K
    steps[place] = step - between * LONGEST_STEP
    long = np.flatnonzero(between)
    for number in long:
        steps[place[number] - between[number] : place[number]] = LONGEST_STEP
    return values, steps, filled
