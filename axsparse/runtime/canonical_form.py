"""The one form in memory in which tensors pass from layer to layer.

Kernels may add in another order where strides or alignment differ. What travels to another stage
arrives dense, so tensors that stay on a stage take the same form at every border between layers.
Buffers that are state start in this form and come back from a checkpoint in this form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes at whose multiples torch allocates memory on CPUs; on GPUs at coarser ones."""


def canonical(tensor: Tensor) -> Tensor:
    """The tensor, dense and in default order at an aligned address; itself if it is so already.
    Differentiable; a copy is made only where memory differs. Sparse tensors stay as they are."""
    if tensor.layout != torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    has_odd_strides = tensor.stride() != _default_strides(tensor)
    is_copied = not tensor.is_contiguous() or bool(tensor.data_ptr() % ALIGNMENT)
    if is_copied or (has_odd_strides and tensor.numel() == 1):  # whose stride a view would keep
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1).view(tensor.shape) if has_odd_strides else tensor


def canonical_gradient(gradient: Tensor | None) -> Tensor | None:
    """The canonical form of a gradient; an operation without a derivative, such as a product with
    quantized weights, gives None."""
    return None if gradient is None else canonical(gradient)


def _default_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of new memory; kernels also read strides that `is_contiguous` ignores."""
    strides, stride = [], 1
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def digest_of(named: Iterable[tuple[object, Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(bytes_of(tensor.detach().cpu()).numpy().data)
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor's entries in their order, flat; a copy only where they lie
    otherwise in memory, or where torch has only noted that they are conjugates or negatives."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # view(-1) would keep the stride of 0 that the one entry of an expanded tensor may have.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
