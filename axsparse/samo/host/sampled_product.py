"""The kept entries of a weight's gradient, computed without the others.

The gradient of a linear weight is a product, ∂W = ∂yᵀ x. Of a weight that is mostly pruned only a
few entries of it are kept, and each is a sum of its own: over the tokens of a microbatch, an
output's gradient times an input. On a CPU that multiplies bf16 it is quicker to compute just these
than to have the dense product and pick them out (docs/decisions/043-sparse-products.md); the
literature calls it a sampled dense-dense matrix product (SDDMM).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.bf16_loops import LENGTHS, SAMPLE, TRANSPOSE, has_bf16_loops
from axsparse.samo.host.compiled_loops import Array
from axsparse.samo.index.base import Index, Int32Index
from axsparse.samo.index.bitmask import MaskIndex
from axsparse.samo.index.pieces import FEW
from axsparse.samo.tensor_state import TensorState

SPARSE = (Int32Index, MaskIndex)
DENSEST = 0.2
"""The density up to which kept entries are computed one by one."""
FEWEST_TOKENS = 64
"""Of fewer tokens the dense product is nearly as quick."""
MOST_THREADS = 2
"""Kept entries are computed by one thread; by more than so many the dense product is as quick."""
TOKENS = 256
"""Tokens of which both factors are laid out for the product at a time."""
COLUMNS = 512
"""Inputs that are laid out at a time: with so many tokens, 256 KiB that stay in the cache."""


def may_be_sparse(weight: Tensor) -> bool:
    """Whether products with this weight may be sparse once enough of it is pruned."""
    return weight.dtype == torch.bfloat16 and weight.dim() == 2 and weight.numel() > FEW


def is_sparse(tensor: TensorState, densest: float) -> bool:
    """Whether a weight has this density or less at present, and there is code that makes use of it.

    Compiled loops are loaded for the first weight that everything else speaks for.
    """
    weight = tensor.parameter
    return (
        may_be_sparse(weight)
        and isinstance(tensor.index, SPARSE)
        and tensor.kept <= densest * weight.numel()
        and torch.get_num_threads() <= MOST_THREADS
        and has_bf16_loops()
    )


def can_sample(tensor: TensorState) -> bool:
    """Whether gradients of this weight are to be sampled, with its present index."""
    return is_sparse(tensor, DENSEST)


def sampled_product(outer: Tensor, inner: Tensor, index: Index) -> Tensor:
    """The entries of `outerᵀ inner` that an index keeps, `(kept,)`, in bf16.

    `outer`, `(tokens, rows)`, and `inner`, `(tokens, columns)`, are in bf16; the index is of a
    `(rows, columns)` matrix. Products are added in fp32, in an order that only depends on the
    number of tokens, and rounded once.
    """
    assert isinstance(index, SPARSE), f"{type(index).__name__}"
    tokens, rows = outer.shape
    width = inner.shape[1]
    columns, ends = index.csr(width)
    assert inner.shape[0] == tokens, f"{inner.shape[0]} inputs for {tokens} output gradients"
    assert ends.size == rows, f"an index of {ends.size} rows for {rows}"
    outer_bits, inner_bits = _bits(outer), _bits(inner)
    sums = torch.zeros(index.kept) if tokens == 0 else torch.empty(index.kept)
    starts = np.zeros_like(ends)
    starts[1:] = ends[:-1]
    for begin in range(0, tokens, TOKENS):
        end = min(begin + TOKENS, tokens)
        length = next(length for length in LENGTHS if length >= end - begin)
        outer_panel, inner_panel = _panel(rows, length), _panel(min(width, COLUMNS), length)
        TRANSPOSE(outer_bits, outer_panel, begin, end, 0)
        cursors = starts.copy()
        for first in range(0, width, COLUMNS):
            part = inner_panel[: min(COLUMNS, width - first)]
            TRANSPOSE(inner_bits, part, begin, end, first)
            where = (columns, cursors, ends)
            SAMPLE((outer_panel, part), first, where, sums.numpy(), int(begin > 0))
    return sums.to(torch.bfloat16)


def _bits(matrix: Tensor) -> Array:
    assert matrix.dtype == torch.bfloat16, f"{matrix.dtype}"
    bits: Array = matrix.contiguous().view(torch.int16).numpy()
    return bits


def _panel(columns: int, length: int) -> Array:
    """Memory for columns of a factor; torch's begins where a vector may begin."""
    bits: Array = torch.empty((columns, length), dtype=torch.int16).numpy()
    return bits
