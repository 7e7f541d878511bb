"""What goes ahead of a message's contents: an int64 array that says all but the contents.

Microbatch, number of tensors, then per tensor its type's number (−1 for None), whether
a gradient is wanted, its dimensions and their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.communication import Direction, Message

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
Header = NDArray[np.int64]
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes an empty tensor of a shape and type."""


def encode_header(message: Message) -> Header:
    """The header of a message; ValueError names a type that no message carries."""
    words = [message.microbatch, len(message.tensors)]
    wanted = message.requires_grad or (False,) * len(message.tensors)
    for tensor, requires_grad in zip(message.tensors, wanted, strict=True):
        if tensor is None:
            words += [-1, 0, 0]
            continue
        if tensor.dtype not in _NUMBERS:
            raise ValueError(
                f"a stage sends a tensor of {tensor.dtype}; messages carry "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            )
        words += [_NUMBERS[tensor.dtype], int(requires_grad), tensor.dim(), *tensor.shape]
    return np.array(words, dtype=np.int64)


def decode_header(words: Header, direction: Direction, empty: Allocate) -> Message:
    """A message with empty tensors of the announced shapes and types."""
    microbatch, count = int(words[0]), int(words[1])
    tensors: list[Tensor | None] = []
    requires_grad = []
    at = 2
    for _ in range(count):
        number, wanted, dims = (int(word) for word in words[at : at + 3])
        at += 3
        shape = [int(size) for size in words[at : at + dims]]
        at += dims
        tensors.append(None if number < 0 else empty(shape, DTYPES[number]))
        requires_grad.append(bool(wanted))
    return Message(direction, microbatch, tuple(tensors), tuple(requires_grad))


def in_host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor on the CPU."""
    return torch.empty(shape, dtype=dtype)


def dense(message: Message) -> Message:
    """The message as it travels: cut off from the graph, every tensor contiguous."""
    tensors = tuple(
        None if tensor is None else tensor.detach().contiguous() for tensor in message.tensors
    )
    return Message(message.direction, message.microbatch, tensors, message.requires_grad)


def contents(message: Message) -> list[Tensor]:
    """The tensors that hold something to be sent, in order."""
    return [tensor for tensor in message.tensors if tensor is not None and tensor.numel()]
