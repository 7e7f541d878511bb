"""A pruned matrix as its kept entries, and its products with a few tokens.

While a language model decodes, each weight is read once for every token, so that a layer takes as
long as its bytes take to read. Of a matrix with n entries, k of them kept, two encodings are known,
and the one of fewer bytes is taken:

    mask   2·k + n/8 + 4·(rows + 1)    bf16 values, one bit an entry, the first value of each row
    list   3·k + 4·(rows + 1)          bf16 values, the distance to the last kept column (1 byte)

that is for each entry, f = k/n: 2·f + 1/8 or 3·f bytes beside the 2 of dense bf16. The list is
smaller below f = 1/8; a distance above 255 takes entries of value zero in between.

Up to `MOST_TOKENS` tokens are multiplied from the kept entries, by loops that add in fp32 and round
once; for more, such as a prompt, the matrix is expanded and multiplied dense.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from axsparse.samo.host.compiled_loops import Array, Loop, can_compile, cpu_features

Encoding = Literal["mask", "list"]
MULTIPLY_MASKED, MULTIPLY_LISTED = (
    Loop("axsparse.samo.host.decode_loops", name) for name in ("multiply_masked", "multiply_listed")
)
MOST_TOKENS = 16
"""Tokens that are multiplied from the kept entries; a dense product is as quick for more."""
WORD = 64
"""Columns of a word of the mask."""
LANES = 8
"""Tokens that the loop over lists multiplies at once."""
GROUP = 4
"""Entries of a list that are multiplied in one round; rows are filled up with zeros."""
LONGEST_STEP = 255
"""The largest distance from one entry of a list to the next."""
SPARE = 32
"""Values that the loops over masks may read behind the last one."""
SHARED_ENTRIES = 1 << 20
"""Entries of a matrix from which on several threads share its rows."""


class KeptMatrix:
    """The kept entries of a matrix `(rows, columns)`, in bf16; the others are zero."""

    def __init__(self, shape: tuple[int, int], mask_D: Tensor, values_K: Tensor) -> None:
        """`mask_D`, `(rows, columns)` of bool, says which entries are kept, and `values_K`,
        `(kept,)`, has their values, row by row."""
        self.shape = shape
        rows, columns = shape
        kept = mask_D.sum(dim=1).numpy()
        listed = 3 * int(kept.sum()) < 2 * int(kept.sum()) + mask_D.numel() // 8
        self.encoding: Encoding = "list" if listed else "mask"
        bits_K = values_K.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if listed:
            self._values, self._where, lengths = _list_of(mask_D.numpy(), bits_K)
            self._words = self._padding = 0
        else:
            self._words = words = -(-columns // WORD)
            self._padding = words * WORD - columns
            padded = np.zeros((rows, words * WORD), bool)
            padded[:, :columns] = mask_D.numpy()
            self._where = np.packbits(padded, axis=1, bitorder="little").view(np.uint64)
            self._values = np.concatenate([bits_K, np.zeros(SPARE, np.uint16)])
            lengths = kept
        self._first = np.zeros(rows + 1, np.int32)
        np.cumsum(lengths, out=self._first[1:])
        held = self._values, self._where, self._first
        self._addresses = tuple(array.ctypes.data for array in held)

    @classmethod
    def of(cls, dense: Tensor) -> KeptMatrix:
        """The entries of a matrix on the CPU that are not zero."""
        rows, columns = dense.shape
        mask_D = dense.detach() != 0
        return cls((rows, columns), mask_D, dense.detach()[mask_D])

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._values.nbytes + self._where.nbytes + self._first.nbytes

    def dense(self) -> Tensor:
        """The matrix in bf16, with its zeros."""
        rows, columns = self.shape
        dense = np.zeros((rows, columns), np.uint16)
        if self.encoding == "mask":
            bits = np.unpackbits(self._where.view(np.uint8), axis=1, bitorder="little")
            dense[bits[:, :columns].view(bool)] = self._values[: self._first[-1]]
        else:
            lengths = np.diff(self._first)
            ends = np.cumsum(self._where, dtype=np.int64)
            before = np.concatenate([[0], ends])[self._first[:-1]]
            column = ends - np.repeat(before, lengths) - 1
            row = np.repeat(np.arange(rows), lengths)
            # What fills a list up is zero and may stand where an entry is: the entry goes last.
            given = self._values != 0
            dense[row[given], column[given]] = self._values[given]
        return torch.from_numpy(dense.view(np.int16)).view(torch.bfloat16)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x Wᵀ + bias`, `(…, rows)` in the type of `x`, of `x`, `(…, columns)`.

        Products are added in fp32 and rounded once. Nothing is recorded for a backward.
        """
        rows, columns = self.shape
        tokens = x.numel() // columns if columns else 0
        if not 0 < tokens <= MOST_TOKENS or not has_loops():
            return functional.linear(x, self.dense().to(x.dtype), bias)
        out = torch.empty(*x.shape[:-1], rows)
        if self.encoding == "list" and tokens > 1:
            self._multiply_lanes(x.reshape(tokens, columns), out.view(tokens, rows))
        else:
            wide = x.float().contiguous()
            if self._padding:
                wide = functional.pad(wide, (0, self._padding))
            sizes = (tokens, self._words, rows) if self.encoding == "mask" else (1,)
            self._share(wide, out, sizes)
        if bias is not None:
            out += bias
        return out.to(x.dtype)

    def _multiply_lanes(self, x: Tensor, out: Tensor) -> None:
        """The product of several tokens with a list: eight numbers of each column side by side."""
        for begin in range(0, len(x), LANES):
            part = x[begin : begin + LANES]
            turned = torch.zeros(self.shape[1], LANES)
            turned[:, : len(part)] = part.T
            sums = torch.empty(self.shape[0], LANES)
            self._share(turned, sums, (LANES,))
            out[begin : begin + LANES] = sums[:, : len(part)].T

    def _share(self, x: Tensor, out: Tensor, sizes: tuple[int, ...]) -> None:
        """Have threads compute rows, each its part."""
        rows, columns = self.shape
        loop = MULTIPLY_MASKED if self.encoding == "mask" else MULTIPLY_LISTED
        multiply = loop.of_numbers(len(self._addresses) + len(sizes) + 4)
        numbers = (x.data_ptr(), *self._addresses, out.data_ptr(), *sizes)
        threads = torch.get_num_threads() if rows * columns >= SHARED_ENTRIES else 1
        if threads == 1:
            multiply(*numbers, 0, rows)
            return
        bounds = [rows * number // threads for number in range(threads + 1)]
        others = [
            _workers(threads - 1).submit(multiply, *numbers, *part)
            for part in list(pairwise(bounds))[1:]
        ]
        multiply(*numbers, *bounds[:2])
        for other in others:
            other.result()


@cache
def _workers(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="axsparse-rows")


@cache
def has_loops() -> bool:
    """Whether loops over kept entries can be compiled and run here."""
    return can_compile()


@cache
def has_vectors() -> bool:
    """Whether the processor has the instructions that make these loops quick."""
    features = cpu_features()
    return {"avx2", "fma"} <= features or {"avx512vbmi2", "avx512bw"} <= features


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
