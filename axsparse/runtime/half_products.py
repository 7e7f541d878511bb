"""Products of matrices and convolutions in half precision on CPUs without instructions for them.

Where oneDNN has no kernel for a type, torch computes with plain loops, 10 to 70 times slower than
in fp32; most laptops have such CPUs. `multiply_in_fp32` puts other kernels in their place, which
convert what is multiplied, compute in fp32 and round the result once. That is what instructions for
half precision do as well, which add up in fp32.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

HALVES = (torch.bfloat16, torch.float16)
PIECE = 1 << 20
"""A product of more elements than this, counting both matrices and the result, is made piece by
piece, since the copies in fp32 should stay in a cache and be in no plan of memory."""
LEAST_LINES = 64
"""A piece has at least so many rows or columns: narrower products are slow."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
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
    """Multiply and convolve on the CPU in fp32 if `dtype` is a type that this CPU lacks.

    Returns whether it is. It holds for the rest of the process, for all types that the CPU lacks.
    Attention in one kernel, and convolutions that are dilated, transposed or of three dimensions,
    are torch's own as before.
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
        library.impl("_slow_conv2d_forward", _convolution(lacking), "CPU")
        library.impl("_slow_conv2d_backward.output_mask", _convolution_backward(lacking), "CPU")
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


def _convolution(lacking: tuple[torch.dtype, ...]) -> Callable[..., Tensor]:
    """The kernel of convolutions of one and two dimensions that oneDNN does not take."""
    own: Any = torch.ops.aten._slow_conv2d_forward.output

    def kernel(
        inputs: Tensor,
        weight: Tensor,
        size: Sequence[int],
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
    ) -> Tensor:
        if inputs.dtype in lacking and weight.dtype == inputs.dtype:
            wide = None if bias is None else bias.float()
            found = F.conv2d(inputs.float(), weight.float(), wide, stride, padding)
            return found.to(inputs.dtype)
        output = inputs.new_empty(0)
        own(inputs, weight, size, bias, stride, padding, output=output)
        return output

    return kernel


def _convolution_backward(lacking: tuple[torch.dtype, ...]) -> Callable[..., Gradients]:
    """The kernel of its gradients, of inputs, weight and bias, of which a mask says the wanted."""
    own: Any = torch.ops.aten._slow_conv2d_backward.grad_input

    # Reason: torch calls it with these.
    def kernel(
        gradient: Tensor,
        inputs: Tensor,
        weight: Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        wanted: Sequence[bool],
    ) -> Gradients:
        found: Sequence[Tensor | None]
        if gradient.dtype in lacking:
            tensors = (gradient.float(), inputs.float(), weight.float())
            kind = ([weight.shape[0]], stride, padding, [1, 1], False, [0, 0], 1)
            wide = torch.ops.aten.convolution_backward(*tensors, *kind, wanted)
            found = [None if each is None else each.to(gradient.dtype) for each in wide]
        else:
            found = [gradient.new_empty(0) for _ in wanted]
            names = ("grad_input", "grad_weight", "grad_bias")
            outputs = dict(zip(names, found, strict=True))
            own(gradient, inputs, weight, size, stride, padding, **outputs)
        first, second, third = (
            each if asked else None for each, asked in zip(found, wanted, strict=True)
        )
        return first, second, third

    return kernel
