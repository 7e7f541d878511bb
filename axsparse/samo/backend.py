"""Backends of training state: torch on a CPU, kernels on a GPU.

Start values and masks are made on the host and moved to the device; what pruning scores and
checkpoints hold is moved back to the host. Everything else stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import DeviceIndex, make_device_index
from axsparse.samo.cuda.kernels import compress, expand
from axsparse.samo.cuda.launch import Launcher
from axsparse.samo.index.base import FullIndex, Index, MaskIndex, make_index
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import IndexKind


@dataclass(frozen=True)
class Backend:
    """The device of a rank's state, and the operations that differ between devices.

    `Backend(device, None)` computes with torch, as `HOST` does; `Backend(device, launcher)` with
    the kernels of `samo/cuda/`. All indices of a layer are made by its backend, so indices that
    kernels read (`Index.on_device`) occur exactly where there is a launcher.
    """

    device: torch.device
    launch: Launcher | None
    """Starts kernels on the device; None computes with torch's own operations."""
    host: Callable[[int], Tensor] | None = None
    """Allocates a number of bytes on the host, where masters and moments rest between updates
    (`samo/offload.py`); None if they stay on the device."""

    def index(self, mask_D: Tensor, kind: IndexKind) -> Index:
        """The index of a flat boolean mask on the host, True where an entry is kept. ConfigError
        for more entries than `kind` can number."""
        if self.launch is None:
            return make_index(mask_D, kind)
        return make_device_index(self.launch, mask_D.to(self.device), kind)

    def rest(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of `size` zeros where masters and moments rest between updates."""
        if self.host is None:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.host(size * dtype.itemsize).view(dtype).zero_()

    def full_index(self, numel: int) -> Index:
        """The index of a tensor of which everything is kept."""
        if self.launch is None:
            return FullIndex(numel)
        return DeviceIndex(self.launch, "full", numel, numel, self.device)

    def compress(self, index: Index, dense_D: Tensor, gradient_K: Tensor, *, adds: bool) -> None:
        """Move a dense gradient's kept entries into `gradient_K`, or add them to it if `adds`."""
        on_device = index.on_device
        if on_device is not None:
            compress(on_device, dense_D, gradient_K, accumulate=adds)
            return
        # In blocks, since a copy of all kept entries would be memory that no plan counts.
        for start in range(0, index.kept, BLOCK):
            stop = min(start + BLOCK, index.kept)
            entries_K = index.gather(dense_D, start, stop)
            if adds:
                gradient_K[start:stop].add_(entries_K)
            else:
                gradient_K[start:stop].copy_(entries_K)

    def expand(self, index: Index, values_K: Tensor, dense_D: Tensor) -> None:
        """Write a weight to dense memory: the values of its kept entries, which are in its type or
        fp32 masters, and zeros everywhere else."""
        on_device = index.on_device
        if on_device is not None:
            expand(on_device, values_K, dense_D)
            return
        if isinstance(index, MaskIndex) and index.expand(values_K, dense_D):
            return
        dense_D.zero_()
        for start in range(0, index.kept, BLOCK):  # as in `compress`
            weight_K = values_K[start : start + BLOCK]
            if weight_K.dtype != dense_D.dtype:
                weight_K = round_to(weight_K, dense_D.dtype)
            index.scatter(dense_D, weight_K, start)


HOST = Backend(torch.device("cpu"), None)


def to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Flat fp64 copies on the host of tensors of one device; the host waits once for all."""
    flat = [part.detach().double().reshape(-1) for part in parts]
    if not flat:
        return []
    return list(torch.cat(flat).cpu().split([part.numel() for part in flat]))
