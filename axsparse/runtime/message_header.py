"""The header of a message: an int64 array that describes the message without its contents.

Its words are the microbatch, the number of tensors, and then for each tensor its type's number in
`DTYPES` (−1 for None), whether a gradient is wanted, the number of its dimensions and their sizes.
The direction is not in it, since each direction has a channel of its own.
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
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
"""The types of element that messages carry; a header gives the position in this list."""
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
Header = NDArray[np.int64]
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor of a shape and type, with undefined contents."""


def encode_header(message: Message) -> Header:
    """The header of a message; ValueError if a tensor's type is not among `DTYPES`."""
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


def decode_header(words: Header, direction: Direction, allocate: Allocate) -> Message:
    """The message that a header describes, with tensors from `allocate` to receive into."""
    microbatch, count = words[:2].tolist()
    tensors: list[Tensor | None] = []
    requires_grad = []
    at = 2
    for _ in range(count):
        number, wanted, dims = words[at : at + 3].tolist()
        at += 3
        shape = words[at : at + dims].tolist()
        at += dims
        tensors.append(None if number < 0 else allocate(shape, DTYPES[number]))
        requires_grad.append(bool(wanted))
    return Message(direction, microbatch, tuple(tensors), tuple(requires_grad))


def in_host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU with undefined contents."""
    return torch.empty(shape, dtype=dtype)


def dense(message: Message) -> Message:
    """The message as it travels: cut off from the autograd graph, every tensor contiguous."""
    tensors = tuple(
        None if tensor is None else tensor.detach().contiguous() for tensor in message.tensors
    )
    return Message(message.direction, message.microbatch, tensors, message.requires_grad)


def contents(message: Message) -> list[Tensor]:
    """The tensors of a message that have at least one element, in order."""
    return [tensor for tensor in message.tensors if tensor is not None and tensor.numel()]
