"""Buffers such as running statistics, which every replica keeps up by what it sees itself.

An evaluation uses those of the first replica on all, and so would a checkpoint. Training
goes on with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from axsparse.models.module_buffers import BufferSlot, slots
from axsparse.runtime.communication import Op
from axsparse.samo.shards import Replicas


class RunningStatistics:
    """The buffers of one stage that are part of the model's state."""

    def __init__(self, modules: Sequence[nn.Module], replicas: Replicas) -> None:
        self._layers = [[slot for slot in slots(module) if slot.persists] for module in modules]
        self._replicas = replicas
        self._before: list[tuple[BufferSlot, Tensor]] = []

    def begin(self) -> None:
        """Open a step: note the running statistics."""
        self._before = [
            (slot, slot.tensor.clone())
            for layer in self._layers
            for slot in layer
            if slot.is_statistic
        ]

    def undo(self) -> None:
        """The step is skipped: what was not finite has not been seen."""
        for slot, tensor in self._before:
            slot.put(tensor)
        self._before = []

    @contextmanager
    def of_first_replica(self) -> Iterator[None]:
        """Within, all replicas have the first one's; all replicas of a stage enter together."""
        own = [(slot, slot.tensor) for layer in self._layers for slot in layer]
        for layer in self._layers:
            tensors = [slot.tensor for slot in layer]
            for slot, tensor in zip(layer, self._received(tensors), strict=True):
                slot.put(tensor)
        try:
            yield
        finally:
            for slot, tensor in own:
                slot.put(tensor)

    def _received(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first replica's values of one layer's buffers, of whatever types, in one message."""
        if self._replicas.size == 1 or not tensors:
            return list(tensors)
        buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        self._replicas.exchange(Op.BROADCAST, buffer)
        parts = buffer.split([tensor.nbytes for tensor in tensors])
        return [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
