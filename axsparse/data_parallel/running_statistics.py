"""The running statistics of a stage, such as a BatchNorm's, and its other saved buffers.

Every replica trains with separate buffers, which follow from the samples that it has seen.
Evaluations and checkpoints use the buffers of the first replica.
"""

from __future__ import annotations

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
        self._before = [
            (slot, slot.tensor.clone())
            for layer in self._layers
            for slot in layer
            if slot.is_statistic
        ]

    def undo(self) -> None:
        """Reset the running statistics to their values at `begin`, after a step that is skipped."""
        for slot, tensor in self._before:
            slot.put(tensor)
        self._before = []

    @contextmanager
    def of_first_replica(self) -> Iterator[None]:
        """Give all replicas the buffers of the first one, inside a with-block.

        All replicas of a stage enter it together; afterwards each has its own buffers again, as
        they were before.
        """
        received = [self._received([slot.tensor for slot in layer]) for layer in self._layers]
        pairs = zip(chain(*self._layers), chain(*received), strict=True)
        with replaced(list(pairs)):
            yield

    def _received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first replica's buffers of one layer; all types travel in one message."""
        if self._replicas.size == 1 or not tensors:
            return [tensor.clone() for tensor in tensors]
        buffer = torch.cat([bytes_of(tensor) for tensor in tensors])
        self._replicas.exchange(Op.BROADCAST, buffer)
        parts = buffer.split([tensor.nbytes for tensor in tensors])
        return [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
