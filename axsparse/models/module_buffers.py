"""The buffers of a module: where they stand, and what they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_STATISTICS = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
"""Running statistics of torch's normalisations, and where they start."""


@dataclass(frozen=True)
class BufferSlot:
    """The place of one buffer in a module."""

    name: str
    """Within the module, such as "norm1.running_mean"."""
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there now; a forward may have put another tensor there."""
        found = self.owner._buffers[self.key]
        assert found is not None
        return found

    def put(self, tensor: Tensor) -> None:
        """Put a tensor there; the one that was there stays as it is."""
        self.owner._buffers[self.key] = tensor

    @property
    def persists(self) -> bool:
        """Whether it is part of the model's state, as of a state dict; if not, it is a cache."""
        return self.key not in self.owner._non_persistent_buffers_set

    @property
    def is_statistic(self) -> bool:
        """Whether a normalisation of torch's keeps it up in training."""
        return isinstance(self.owner, _NormBase) and self.key in _STATISTICS

    def start(self) -> Tensor:
        """Where a running statistic starts."""
        tensor = self.tensor
        return torch.full(tensor.shape, _STATISTICS[self.key], dtype=tensor.dtype, device="cpu")


def slots(module: nn.Module) -> list[BufferSlot]:
    """The places of all buffers of a module, in its order; a shared one is found once."""
    return [
        BufferSlot(f"{prefix}.{key}" if prefix else key, child, key)
        for prefix, child in module.named_modules()
        for key, buffer in child._buffers.items()
        if buffer is not None
    ]


def tracked_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The normalisations with running statistics, by name within the module."""
    return {
        prefix: child
        for prefix, child in module.named_modules()
        if isinstance(child, _NormBase) and child.running_mean is not None
    }
