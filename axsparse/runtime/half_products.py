"""Products of matrices and convolutions in half precision on CPUs without instructions for them.

Where oneDNN has no kernel for a type, torch computes with plain loops; most laptops have such CPUs.
In bf16 on a CPU with AVX2 alone, products of a layer's size take 3 to 20 times as long as by
way of fp32, and convolutions 3 to 7 times. `multiply_in_fp32` puts other kernels in their place,
which convert what is multiplied, compute in fp32 and round the result once. That is what
instructions for half precision do as well, which add up in fp32.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
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
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "mm": torch.mm,
    "addmm": torch.addmm,
    "bmm": torch.bmm,
    "baddbmm": torch.baddbmm,
}
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Part = tuple[slice, ...]
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

    Returns whether the CPU lacks it. The change holds for the rest of the process, for all types
    that the CPU lacks. Attention in one kernel, and convolutions that are dilated, transposed or of
    three dimensions, are torch's own as before.
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
        for name in PRODUCTS:
            library.impl(name, _product(name, lacking), "CPU")
        library.impl("_slow_conv2d_forward", _convolution(lacking), "CPU")
        library.impl("_slow_conv2d_backward.output_mask", _convolution_backward(lacking), "CPU")
    return library


def _product(name: str, lacking: tuple[torch.dtype, ...]) -> Callable[..., Tensor]:
    """A kernel that multiplies in fp32 if all tensors have the same type, which the CPU lacks."""
    # torch's own kernel stays behind the operator that is given its output.
    own: Any = getattr(torch.ops.aten, name).out
    product = PRODUCTS[name]

    def kernel(*tensors: Tensor, **factors: Any) -> Tensor:
        dtype = tensors[0].dtype
        if dtype not in lacking or any(tensor.dtype != dtype for tensor in tensors):
            result: Tensor = own(*tensors, **factors, out=tensors[0].new_empty(0))
            return result
        *added, left, right = tensors
        result = left.new_empty(*left.shape[:-1], right.shape[-1])
        added = [tensor.expand(result.shape) for tensor in added]
        for part, left_part, right_part in _parts(left.shape, right.shape[-1]):
            factors_of_part = (*(tensor[part] for tensor in added), left[left_part])
            wide = [tensor.float() for tensor in (*factors_of_part, right[right_part])]
            result[part] = product(*wide, **factors)
        return result

    return kernel


def _parts(left: Sequence[int], n: int) -> Iterator[tuple[Part, Part, Part]]:
    """The parts of a product with n columns that are made one by one, each with its parts of the
    left and the right matrix: some matrices of a batch, or some rows or columns of one matrix."""
    *batch, m, k = left
    size, everything = k * (m + n) + m * n, slice(None)
    if batch:
        step = max(1, PIECE // max(1, size))
        for start in range(0, batch[0], step):
            part = (slice(start, start + step),)
            yield part, part, part
    elif size <= PIECE:
        yield (everything, everything), (everything,), (everything,)
    else:
        step = max(LEAST_LINES, PIECE // max(1, k + min(m, n)))
        for start in range(0, max(m, n), step):
            lines = slice(start, start + step)
            if m >= n:
                yield (lines, everything), (lines,), (everything,)
            else:
                yield (everything, lines), (everything,), (everything, lines)


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
            result = F.conv2d(inputs.float(), weight.float(), wide, stride, padding)
            return result.to(inputs.dtype)
        output = inputs.new_empty(0)
        own(inputs, weight, size, bias, stride, padding, output=output)
        return output

    return kernel


def _convolution_backward(lacking: tuple[torch.dtype, ...]) -> Callable[..., Gradients]:
    """The kernel of the gradients of inputs, weight and bias; a mask says which are needed."""
    own: Any = torch.ops.aten._slow_conv2d_backward.grad_input

    # Reason: torch calls it with these.
    def kernel(
        gradient: Tensor,
        inputs: Tensor,
        weight: Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        needed: Sequence[bool],
    ) -> Gradients:
        gradients: Sequence[Tensor | None]
        if gradient.dtype in lacking:
            tensors = (gradient.float(), inputs.float(), weight.float())
            kind = ([weight.shape[0]], stride, padding, [1, 1], False, [0, 0], 1)
            wide = torch.ops.aten.convolution_backward(*tensors, *kind, needed)
            gradients = [None if each is None else each.to(gradient.dtype) for each in wide]
        else:
            gradients = [gradient.new_empty(0) for _ in needed]
            names = ("grad_input", "grad_weight", "grad_bias")
            outputs = dict(zip(names, gradients, strict=True))
            own(gradient, inputs, weight, size, stride, padding, **outputs)
        first, second, third = (
            each if asked else None for each, asked in zip(gradients, needed, strict=True)
        )
        return first, second, third

    return kernel
