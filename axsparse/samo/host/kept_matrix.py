"""A pruned matrix as its kept entries, and its products with a few tokens.

While a language model decodes, each weight is read once for every token, so that a layer takes as
long as its bytes take to read. `kept_encodings.py` has the encodings.

Tokens are multiplied from the kept entries, `MOST_TOKENS` at a time, by loops that add in fp32 and
round once; long prompts with the expanded matrix, where that is quicker.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from axsparse.samo.host.compiled_loops import AVX2, can_compile, cpu_features, has_bf16_loops
from axsparse.samo.host.kept_encodings import (
    MOST_TOKENS,
    SUMS,
    WORD,
    Encoding,
    Listed,
    Masked,
    Sliced,
)

FEW = 8
"""Of how many entries one may be kept at most for a list or slices."""
LINE = 64
"""Bytes of a line of the cache; a vector that lies across two takes two times as long to read."""
SHARED_ENTRIES = 1 << 20
"""Entries of a matrix from which on several threads share its rows."""


class KeptMatrix:
    """The kept entries of a matrix `(rows, columns)`, in bf16; the others are zero."""

    def __init__(self, dense: Tensor) -> None:
        """The entries of a matrix on the CPU that are not zero once they are bf16."""
        self.shape = dense.shape
        bits_D = dense.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        mask_D = bits_D << 1 != 0
        by_bf16 = has_bf16_loops()
        self.encoding: Encoding
        if int(mask_D.sum()) * FEW >= mask_D.size:
            self.encoding = Masked(bits_D, mask_D, by_bf16=by_bf16)
        else:
            self.encoding = (Sliced if by_bf16 else Listed)(bits_D, mask_D)
        self._scratch = SUMS + MOST_TOKENS * 2 * (self.shape[1] + WORD)

    @property
    def nbytes(self) -> int:
        return self.encoding.nbytes

    def dense(self) -> Tensor:
        """The matrix in bf16, with its zeros."""
        return torch.from_numpy(self.encoding.dense().view(np.int16)).view(torch.bfloat16)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x Wᵀ + bias`, `(…, rows)` in the type of `x`, of `x`, `(…, columns)`; the bias has the
        shape of a row, `(rows,)`, or another that is added to all of them.

        Products are added in fp32 and rounded once. Nothing is recorded for a backward, but for
        the bias.
        """
        rows, columns = self.shape
        tokens = x.numel() // columns if columns else 0
        kind = x.dtype
        if not tokens or not has_loops() or tokens >= expanded_from(kind):
            return functional.linear(x, self.dense().to(kind), bias)
        if tokens > MOST_TOKENS:
            parts = x.reshape(tokens, columns).split(MOST_TOKENS)
            products = torch.cat([self.multiply(part, bias) for part in parts])
            return products.view(*x.shape[:-1], rows)
        if bias is not None:
            is_recorded = bias.requires_grad and torch.is_grad_enabled()
            is_row = bias.shape == (rows,) and bias.is_contiguous()
            if bias.dtype is not kind or is_recorded or not is_row:
                return (self.multiply(x.float()) + bias).to(kind)
        is_bf16 = kind is torch.bfloat16
        if not is_bf16 and kind is not torch.float32:
            return self.multiply(x.float(), None if bias is None else bias.float()).to(kind)
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], rows))
        at = 0 if bias is None else bias.data_ptr()
        numbers = x.data_ptr(), at, out.data_ptr(), is_bf16, tokens, self.encoding.address
        threads = torch.get_num_threads() if rows * columns >= SHARED_ENTRIES else 1
        if threads == 1:
            self._multiply_rows(numbers, 0, rows)
            return out
        block = self.encoding.block
        bounds = [rows * number // threads // block * block for number in range(threads)] + [rows]
        others = [
            _workers(threads - 1).submit(self._multiply_rows, numbers, *part)
            for part in list(pairwise(bounds))[1:]
        ]
        self._multiply_rows(numbers, *bounds[:2])
        for other in others:
            other.result()
        return out

    def _multiply_rows(self, numbers: tuple[int, ...], begin: int, end: int) -> None:
        scratch = _SCRATCH.of(self._scratch)
        self.encoding.multiply(*numbers, scratch, begin, end)


class _Scratch(threading.local):
    """Memory for the tokens in fp32, which all products of one thread use."""

    held, address = np.empty(0, np.float32), 0

    def of(self, size: int) -> int:
        """The address of memory for this many numbers."""
        if size > self.held.size - LINE:
            self.held = np.empty(size + LINE, np.float32)
            self.address = -(-self.held.ctypes.data // LINE) * LINE
        return self.address


_SCRATCH = _Scratch()


@cache
def _workers(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="axsparse-rows")


@cache
def has_loops() -> bool:
    """Whether loops over kept entries can be compiled here, for vectors of the processor."""
    return can_compile() and cpu_features() >= AVX2


@cache
def expanded_from(dtype: torch.dtype) -> float:
    """The tokens from which on a dense product with the expanded matrix is quicker, at 50 % zeros;
    in bf16 it never is where the processor does not multiply bf16."""
    if dtype is torch.bfloat16:
        return 512 if has_bf16_loops() else math.inf
    return 128
