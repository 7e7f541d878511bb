"""The running statistics of a stage, such as a BatchNorm's, and its other saved buffers.

Every replica trains with buffers of its own, which follow from the samples that it has seen.
Evaluations and checkpoints use the buffers of the first replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from axsparse.models.module_buffers import BufferSlot, replaced, slots
from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Op
from axsparse.samo.shards import Replicas


class RunningStatistics:
    """The buffers of one stage that are part of the saved state."""

    def __init__(self, modules: Sequence[nn.Module], replicas: Replicas) -> None:
        self._layers = [[slot for slot in slots(module) if slot.persists] for module in modules]
        self._replicas = replicas
        self._before: list[tuple[BufferSlot, Tensor]] = []

    def begin(self) -> None:
        """Open a step: remember the running statistics."""
        self._before = [
            (slot, slot.tensor.clone())
            for layer in self._layers
            for slot in layer
            if slot.is_statistic
        ]

    def undo(self) -> None:
        """Set the running statistics back to those at `begin`, after a step that is skipped."""
        for slot, tensor in self._before:
            slot.put(tensor)
        self._before = []

    @contextmanager
    def of_first_replica(self) -> Iterator[None]:
        """Give all replicas the buffers of the first one, inside a with-block.

        All replicas of a stage enter it together; afterwards each has its own buffers again.
        """
        received = [self._received([slot.tensor for slot in layer]) for layer in self._layers]
        pairs = zip(chain(*self._layers), chain(*received), strict=True)
        with replaced(list(pairs)):
            yield

    def different(self) -> list[tuple[int, str]]:
        """The buffers that differ between replicas, other than running statistics of torch's
        normalization layers: the number of the layer on this stage, and the buffer's name in it.

        What a layer computes in training may depend on such a buffer. All replicas of a stage call
        this together.
        """
        compared = [
            (number, slot)
            for number, layer in enumerate(self._layers)
            for slot in layer
            if not slot.is_statistic
        ]
        digests = torch.zeros(self._replicas.size, len(compared), dtype=torch.float64)
        for column, (_, slot) in enumerate(compared):
            digests[self._replicas.rank, column] = _digest(slot.tensor)
        self._replicas.exchange(Op.ALL_REDUCE, digests.view(-1))
        is_odd = (digests != digests[:1]).any(dim=0).tolist()
        return [
            (number, slot.name) for (number, slot), odd in zip(compared, is_odd, strict=True) if odd
        ]

    def _received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first replica's buffers of one layer; all types travel in one message."""
        if self._replicas.size == 1 or not tensors:
            return list(tensors)
        buffer = torch.cat([bytes_of(tensor) for tensor in tensors])
        self._replicas.exchange(Op.BROADCAST, buffer)
        parts = buffer.split([tensor.nbytes for tensor in tensors])
        return [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]


def _digest(tensor: Tensor) -> int:
    """A hash of a buffer's contents, of 52 bits so that a float holds it exactly."""
    raw = bytes_of(tensor.detach()).cpu().numpy()
    return int.from_bytes(hashlib.blake2b(raw.tobytes(), digest_size=8).digest(), "big") >> 12
