"""Products with a weight of which few entries are kept, computed from these alone.

A linear layer has three products: its output, y = x Wᵀ + b, the gradient of its input, ∂x = ∂y W,
and that of its weight, whose kept entries `sampled_product.py` computes. The weight stays dense:
on the way its entries other than zero are listed, line by line, which costs little beside what
they are multiplied with (docs/decisions/043-sparse-products.md).
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

from axsparse.samo.host.bf16_loops import (
    ADD_PRODUCTS,
    PUT,
    TILE,
    TRANSPOSE,
    multiplies_matrices,
)
from axsparse.samo.host.compiled_loops import Array
from axsparse.samo.host.sampled_product import is_sparse
from axsparse.samo.tensor_state import TensorState

DENSEST = 0.3
"""The density up to which a layer's output and the gradient of its input are computed from kept
entries."""
DENSEST_WITH_AMX = 0.05
"""The same of processors that multiply whole matrices at once."""
LINES = 256
"""Lines of the weight whose entries are listed at a time."""
DEPTH = 512
"""Inputs of which they are listed at a time: what 64 tokens have there stays in the cache."""
STRETCH = 1024
"""Tokens that are laid out at a time."""
SPARE = 36
"""Entries of a list that may be written behind its end."""


def can_multiply(tensor: TensorState) -> bool:
    """Whether products with this weight are to be computed from what is kept of it at present."""
    return is_sparse(tensor, DENSEST_WITH_AMX if multiplies_matrices() else DENSEST)


def sparse_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows weightᵀ + bias`, `(tokens, outputs)`, of rows `(tokens, inputs)`, all in bf16.

    Each entry is the sum of what weights other than zero contribute, in the order of the inputs,
    in fp32, rounded once. Entries below bf16's normal numbers count as zero.
    """
    return _product(rows, weight, bias, is_transposed=False)


def sparse_input_gradient(outer: Tensor, weight: Tensor) -> Tensor:
    """`outer weight`, `(tokens, inputs)`, of output gradients `(tokens, outputs)`; see
    `sparse_linear`."""
    return _product(outer, weight, None, is_transposed=True)


def _product(matrix: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
    """`matrix weightᵀ + bias`, or if `is_transposed`, `matrix weight + bias`.

    The lines of a weight are its rows, or if it is transposed its columns. Each gives one output.
    """
    wanted, width = weight.shape[::-1] if is_transposed else weight.shape
    tokens = matrix.shape[0]
    assert matrix.shape == (tokens, width), f"{tuple(matrix.shape)} for {width} inputs"
    assert bias is None or bias.shape == (wanted,), f"{tuple(bias.shape)} for {wanted} outputs"
    added = torch.zeros(wanted) if bias is None else bias.detach().to(torch.float32)
    outputs = torch.empty(tokens, wanted, dtype=torch.bfloat16)
    weights = bits_of(weight), is_transposed
    for begin in range(0, tokens, STRETCH):
        rows = matrix[begin : begin + STRETCH]
        _multiply(bits_of(rows), weights, added.numpy(), bits_of(outputs), begin)
    return outputs


def _multiply(
    rows: Array, weights: tuple[Array, bool], bias: Array, outputs: Array, begin: int
) -> None:
    """Write the outputs of some rows, from row `begin` of the outputs on."""
    matrix, is_transposed = weights
    scratch = _scratch()
    tokens, width = rows.shape
    tiles = range(0, tokens, TILE)
    panels = []
    for at in range(0, width, DEPTH):
        panel = _int16(len(tiles), min(DEPTH, width - at), TILE)
        for number, first in enumerate(tiles):
            end = min(first + TILE, tokens)
            TRANSPOSE(rows, panel[number], first, end, at)
        panels.append(panel)
    for first in range(0, len(bias), LINES):
        count = min(LINES, len(bias) - first)
        sums = torch.empty(len(tiles), count, TILE).numpy()
        sums[:] = bias[first : first + count, None]
        for number, panel in enumerate(panels):
            at, depth = number * DEPTH, panel.shape[1]
            if is_transposed:
                turned = scratch.lines[: count * depth]
                TRANSPOSE(matrix, turned.reshape(count, depth), at, at + depth, first)
                lines = turned, 0, depth
            else:
                lines = matrix.reshape(-1), first * width + at, width
            ADD_PRODUCTS(panel, lines, scratch.lists, sums)
        PUT(sums, scratch.rounded, outputs, begin, first)


def bits_of(matrix: Tensor) -> Array:
    """The bits of a matrix of bf16, row by row."""
    assert matrix.dtype == torch.bfloat16, f"{matrix.dtype}"
    bits: Array = matrix.detach().contiguous().view(torch.int16).numpy()
    return bits


def _int16(*shape: int) -> Array:
    """Memory for numbers; torch's begins where a vector may begin."""
    bits: Array = torch.empty(shape, dtype=torch.int16).numpy()
    return bits


class _Scratch(threading.local):
    """Memory that all products of one thread use, one after the other: 0.9 MB."""

    def __init__(self) -> None:
        size = LINES, DEPTH + SPARE
        self.lines = _int16(LINES * DEPTH)
        """Lines of a weight that is transposed."""
        rounds: Array = torch.empty(LINES, dtype=torch.int64).numpy()
        self.lists = _int16(*size), _int16(*size), rounds
        """Inputs and weights of each line, and the rounds in which they are multiplied."""
        self.rounded = _int16(LINES, TILE)


@cache
def _scratch() -> _Scratch:
    return _Scratch()
