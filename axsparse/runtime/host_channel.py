"""One-way channels between the hosts of neighbouring stages, and how a message travels on them.

A message is a header and the bytes of its tensors. `MpiLink` sends entire messages over channels.
The link of GPUs sends headers over them, and contents too, where these pass through the hosts.
`runtime/mpi/mpi_link.py` implements the channels.

The header is an int64 array that describes the message without its contents. Its words are the
microbatch, the number of tensors, and then for each tensor its type's number in `DTYPES` (−1 for
None), whether its gradient is to come back, the number of its dimensions and their sizes. The
direction is not in it, since each direction has a separate channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Direction, Event, Message
from axsparse.runtime.files.safetensors import DTYPES as STORED_DTYPES
from axsparse.runtime.grid import RankCoords

DTYPES = tuple(dtype for dtype in STORED_DTYPES.values() if not dtype.is_complex)
"""The types of element that messages carry; a header gives the position in this list."""
QUIET_PASSES = 2
"""A link stops looking for arrivals after this many looks in a row that find nothing. A look that
finds nothing may have let MPI take in messages: after a long action one look saw nothing in 12
cases of 12 (MPICH 5.0), two saw everything, and schedules must decide on all arrivals."""
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
Header = NDArray[np.int64]
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor of a shape and type, with undefined contents."""


def encode_header(message: Message) -> Header:
    """The header of a message; ValueError if a tensor's type is not among `DTYPES`."""
    words = [message.microbatch, len(message.tensors)]
    need_gradients = message.requires_grad or (False,) * len(message.tensors)
    for tensor, requires_grad in zip(message.tensors, need_gradients, strict=True):
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
        number, needs_gradient, dims = words[at : at + 3].tolist()
        at += 3
        shape = words[at : at + dims].tolist()
        at += dims
        tensors.append(None if number < 0 else allocate(shape, DTYPES[number]))
        requires_grad.append(bool(needs_gradient))
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


class HostChannel(Protocol):
    """One end of a channel; one end sends and the other receives. No call waits.

    Headers arrive in the order in which they were sent, and so do pieces of contents; there is
    no order between the two.
    """

    def send_header(self, header: Header) -> Event:
        """Start sending a header."""
        ...

    def receive_header(self) -> Header | None:
        """The next header, or None if it is not here yet."""
        ...

    def send(self, piece: Tensor) -> Event:
        """Start sending a flat tensor of bytes."""
        ...

    def receive(self, piece: Tensor) -> Event:
        """Start receiving into a flat tensor of bytes, which has the size of the sent message."""
        ...


class HostChannels(Protocol):
    """Makes the channels of one link."""

    def channel(self, direction: Direction, source: int, target: int) -> HostChannel:
        """This rank's end of the channel from `source` to `target`, of which it is one."""
        ...

    def close(self) -> None:
        """Release the channels, on which nothing is under way any more."""
        ...


def neighbours(coords: RankCoords, direction: Direction) -> list[tuple[int, int]]:
    """The (source, target) ranks between which this rank has messages to move in a direction."""
    rank, step = coords.rank, 1 if direction is Direction.FORWARD else -1
    before, after = coords.neighbour(-step), coords.neighbour(step)
    starts, ends = (coords.is_first, coords.is_last)[::step]
    return [(before, rank)] * (not starts) + [(rank, after)] * (not ends)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, without a copy."""
    assert tensor.is_contiguous(), "a copy would be received into, and lost"
    return bytes_of(tensor)


def byte_pieces(tensor: Tensor, most: int) -> list[Tensor]:
    """The bytes of a contiguous tensor as views of at most `most` bytes; an empty one has none."""
    content = as_bytes(tensor)
    return [content[start : start + most] for start in range(0, content.numel(), most)]
