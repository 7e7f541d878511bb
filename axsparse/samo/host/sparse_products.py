"""The three products of a linear layer, computed from the kept entries of its weight alone.

They are the output, y = x Wᵀ + b, and the gradients of the input, ∂x = ∂y W, and of the weight, ∂W
= ∂yᵀ x. Of a weight that is mostly pruned only a few entries of ∂W are kept, and each is a separate
sum: over the tokens of a microbatch, an output's gradient times an input. On a CPU that multiplies
bf16 it is quicker to compute just these than to have the dense product and pick them out; the
literature calls it a sampled dense-dense matrix product (SDDMM). For the other two products the
weight stays dense: on the way its entries other than zero are listed, line by line, which costs
little compared with the products (docs/decisions/043-sparse-products.md).
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.host.compiled_loops import (
    COLUMNS,
    DEPTH,
    FEW,
    LENGTHS,
    LINES,
    TILE,
    Array,
    Loop,
    has_bf16_loops,
    multiplies_matrices,
)
from axsparse.samo.index.base import Index, Int32Index, MaskIndex
from axsparse.samo.tensor_state import TensorState

SAMPLED_PRODUCT, MULTIPLY = (
    Loop("axsparse.samo.host.sparse_product_loops", name)
    for name in ("sampled_product", "multiply")
)
SPARSE = (Int32Index, MaskIndex)
DENSEST_SAMPLED = 0.2
"""The density up to which kept entries of a weight's gradient are computed one by one."""
DENSEST = 0.3
"""The density up to which outputs and input gradients are computed from kept entries."""
DENSEST_WITH_AMX = 0.05
"""The same density on processors that multiply matrix tiles at once."""
FEWEST_TOKENS = 64
"""Fewest tokens for sparse products: below, the dense product is nearly as quick."""
MOST_THREADS = 2
"""Kept entries are computed by one thread; by more than this the dense product is as quick."""
STRETCH = 1024
"""Tokens that are laid out for the list at a time."""
SPARE = 36
"""Entries of a list that may be written behind its end."""


def may_be_sparse(weight: Tensor) -> bool:
    """Whether products with this weight may be sparse once enough of it is pruned."""
    return weight.dtype == torch.bfloat16 and weight.dim() == 2 and weight.numel() > FEW


def can_sample(tensor: TensorState) -> bool:
    """Whether gradients of this weight are to be sampled, with its present index."""
    return _is_sparse(tensor, DENSEST_SAMPLED)


def can_multiply(tensor: TensorState) -> bool:
    """Whether products with this weight are to be computed from its present kept entries."""
    return _is_sparse(tensor, DENSEST_WITH_AMX if multiplies_matrices() else DENSEST)


def _is_sparse(tensor: TensorState, densest: float) -> bool:
    """Whether a weight has this density or less at present, and there are compiled loops for it."""
    weight = tensor.parameter
    return (
        may_be_sparse(weight)
        and isinstance(tensor.index, SPARSE)
        and tensor.kept <= densest * weight.numel()
        and torch.get_num_threads() <= MOST_THREADS
        and has_bf16_loops()
    )


def _bits_of(matrix: Tensor) -> Array:
    """The bits of a matrix of bf16, row by row."""
    assert matrix.dtype == torch.bfloat16, f"{matrix.dtype}"
    bits: Array = matrix.detach().contiguous().view(torch.int16).numpy()
    return bits


def _int16(*shape: int) -> Array:
    """Memory for numbers; torch's begins where a vector may begin."""
    bits: Array = torch.empty(shape, dtype=torch.int16, device="cpu").numpy()
    return bits


# -- the weight's gradient --------------------------------------------------------------------


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
    factors = _bits_of(outer), _bits_of(inner)
    make = torch.zeros if tokens == 0 else torch.empty
    sums = make(index.kept, dtype=torch.float32)
    length = next((length for length in LENGTHS if length >= tokens), LENGTHS[-1])
    room = _int16(rows, length), _int16(min(width, COLUMNS), length)
    SAMPLED_PRODUCT(factors, (columns, np.empty_like(ends), ends), room, sums.numpy())
    return sums.to(torch.bfloat16)


# -- the output and the input's gradient ------------------------------------------------------


def sparse_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows weightᵀ + bias`, `(tokens, outputs)`, of rows `(tokens, inputs)`, all in bf16.

    Each entry is the sum of what weights other than zero contribute, in the order of the inputs,
    in fp32, rounded once. Entries below bf16's normal numbers count as zero.
    """
    return _product(rows, weight, bias, is_transposed=False)


def sparse_input_gradient(outer: Tensor, weight: Tensor) -> Tensor:
    """`outer weight`, `(tokens, inputs)`, of `(tokens, outputs)`; see `sparse_linear`."""
    return _product(outer, weight, None, is_transposed=True)


def _product(matrix: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
    """`matrix weightᵀ + bias`, or if `is_transposed`, `matrix weight + bias`; each line of the
    weight, a row or if it is transposed a column, gives one output."""
    num_outputs, width = weight.shape[::-1] if is_transposed else weight.shape
    tokens = matrix.shape[0]
    assert matrix.shape == (tokens, width), f"{tuple(matrix.shape)} for {width} inputs"
    assert bias is None or bias.shape == (num_outputs,), f"{tuple(bias.shape)} for {num_outputs}"
    added = torch.zeros(num_outputs, dtype=torch.float32)
    if bias is not None:
        added.copy_(bias.detach())
    outputs = torch.empty(tokens, num_outputs, dtype=torch.bfloat16)
    weights = _bits_of(weight), int(is_transposed)
    tiles = -(-min(tokens, STRETCH) // TILE)
    sums: Array = torch.empty(tiles * min(num_outputs, LINES), TILE, dtype=torch.float32).numpy()
    scratch = _SCRATCH.lines, _SCRATCH.rounded, _SCRATCH.lists
    room = _int16(tiles * width, TILE), sums, *scratch
    for begin in range(0, tokens, STRETCH):
        rows = _bits_of(matrix[begin : begin + STRETCH])
        MULTIPLY(rows, weights, added.numpy(), (_bits_of(outputs), begin), room)
    return outputs


class _Scratch(threading.local):
    """Memory that all products of one thread use, one after the other: 0.9 MB."""

    def __init__(self) -> None:
        size = LINES, DEPTH + SPARE
        self.lines = _int16(LINES, DEPTH)
        """Lines of a weight that is transposed."""
        rounds: Array = torch.empty(LINES, dtype=torch.int64, device="cpu").numpy()
        self.lists = _int16(*size), _int16(*size), rounds
        """Inputs and weights of each line, and the rounds in which they are multiplied."""
        self.rounded = _int16(LINES, TILE)


_SCRATCH = _Scratch()
