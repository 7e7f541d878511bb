"""Products of half-precision matrices on CPUs that have no instructions for them.

Where oneDNN has no kernel for a type, torch multiplies with plain loops, 10 to 70 times slower than
in fp32; most laptops have such CPUs. `multiply_in_fp32` puts other kernels in their place, which
convert both matrices, multiply in fp32 and round the result once. That is what instructions for
half precision do as well, which add up in fp32.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

HALVES = (torch.bfloat16, torch.float16)
PIECE = 1 << 20
"""A product of more elements than this, counting both matrices and the result, is made piece by
piece, since the copies in fp32 should stay in a cache and be in no plan of memory."""
LEAST_LINES = 64
"""A piece has at least so many rows or columns: narrower products are slow."""
_library: Library | None = None
"""Holds the kernels, which torch forgets with it."""


def lacking_types() -> tuple[torch.dtype, ...]:
    """The half-precision types whose products are slow on this machine's CPU.

    Other processors than x86 are taken to have them, since none was measured.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    if not torch.backends.mkldnn.is_available():
        return HALVES
    checks = (
        torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.ops.mkldnn._is_mkldnn_fp16_supported,
    )
    return tuple(dtype for dtype, check in zip(HALVES, checks, strict=True) if not check())


def multiply_in_fp32(dtype: torch.dtype) -> bool:
    """Multiply matrices on the CPU in fp32 if their type is `dtype` and this CPU lacks it.

    Returns whether it does. It holds for the rest of the process, for all types that the CPU
    lacks. Convolutions and attention in one kernel are torch's own as before.
    """
    global _library
    lacking = lacking_types()
    if dtype not in lacking:
        return False
    if _library is None:
        _library = replaced_kernels(lacking)
    return True


def replaced_kernels(lacking: tuple[torch.dtype, ...]) -> Library:
    """Replace torch's products on the CPU, which last as long as what is returned."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of kernels that are replaced.
        warnings.simplefilter("ignore")
        for name, wide in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm), ("baddbmm", _baddbmm)):
            library.impl(name, _kernel(name, wide, lacking), "CPU")
    return library


def _kernel(
    name: str, wide: Callable[..., Tensor], lacking: tuple[torch.dtype, ...]
) -> Callable[..., Tensor]:
    """A kernel that runs `wide` if all tensors have the same type, which the CPU lacks."""
    # torch's own kernel stays behind the operator that is given its output.
    own: Any = getattr(torch.ops.aten, name).out

    def kernel(*tensors: Tensor, **factors: Any) -> Tensor:
        dtype = tensors[0].dtype
        if dtype in lacking and all(tensor.dtype == dtype for tensor in tensors):
            return wide(*tensors, **factors)
        result: Tensor = own(*tensors, **factors, out=tensors[0].new_empty(0))
        return result

    return kernel


def _mm(left: Tensor, right: Tensor) -> Tensor:
    def product(rows: slice, columns: slice) -> Tensor:
        return _wide(torch.mm, (left[rows], right[:, columns]))

    return _in_pieces(left, right, product)


def _addmm(added: Tensor, left: Tensor, right: Tensor, **factors: Any) -> Tensor:
    whole = added.expand(left.shape[0], right.shape[1])

    def product(rows: slice, columns: slice) -> Tensor:
        tensors = whole[rows, columns], left[rows], right[:, columns]
        return _wide(torch.addmm, tensors, factors)

    return _in_pieces(left, right, product)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    def product(batch: slice) -> Tensor:
        return _wide(torch.bmm, (left[batch], right[batch]))

    return _in_batches(left, right, product)


def _baddbmm(added: Tensor, left: Tensor, right: Tensor, **factors: Any) -> Tensor:
    whole = added.expand(left.shape[0], left.shape[1], right.shape[2])

    def product(batch: slice) -> Tensor:
        return _wide(torch.baddbmm, (whole[batch], left[batch], right[batch]), factors)

    return _in_batches(left, right, product)


def _wide(
    product: Callable[..., Tensor],
    tensors: Iterable[Tensor],
    factors: Mapping[str, float] | None = None,
) -> Tensor:
    """The product of copies in fp32."""
    return product(*(tensor.float() for tensor in tensors), **(factors or {}))


def _in_pieces(left: Tensor, right: Tensor, product: Callable[[slice, slice], Tensor]) -> Tensor:
    """The product of (m, k) and (k, n), rounded; pieces are rows or columns of the result."""
    (m, k), n = left.shape, right.shape[1]
    everything = slice(None)
    if k * (m + n) + m * n <= PIECE:
        return product(everything, everything).to(left.dtype)
    result = left.new_empty(m, n)
    lines, other = max(m, n), min(m, n)
    step = max(LEAST_LINES, PIECE // max(1, k + other))
    for start in range(0, lines, step):
        piece = slice(start, start + step)
        at = (piece, everything) if m >= n else (everything, piece)
        result[at] = product(*at)
    return result


def _in_batches(left: Tensor, right: Tensor, product: Callable[[slice], Tensor]) -> Tensor:
    """The product of (b, m, k) and (b, k, n), rounded; pieces are some of the b."""
    (b, m, k), n = left.shape, right.shape[2]
    result = left.new_empty(b, m, n)
    step = max(1, PIECE // max(1, k * (m + n) + m * n))
    for start in range(0, b, step):
        piece = slice(start, start + step)
        result[piece] = product(piece)
    return result
