"""Where training state lives, and what computes on it there: torch on a CPU, kernels on a GPU.

State stays on its device. What is drawn, saved and looked at stays on the host: start values
and masks come from there, and what pruning scores and checkpoints hold goes back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import DeviceIndex, make_device_index
from axsparse.samo.cuda.launch import Launcher
from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.state_bytes import IndexKind


@dataclass(frozen=True)
class Backend:
    """The device of a rank's state."""

    device: torch.device
    launch: Launcher | None
    """Runs its kernels; None where torch's own operations are all there is."""
    host: Callable[[int], Tensor] | None = None
    """So many bytes of the host, where masters and moments rest between updates
    (`samo/offload.py`); None: they stay on the device."""

    def index(self, mask_D: Tensor, kind: IndexKind) -> Index:
        """The index of a flat boolean mask (True: kept) of the host; ConfigError as
        `make_index`."""
        if self.launch is None:
            return make_index(mask_D, kind)
        return make_device_index(self.launch, mask_D.to(self.device), kind)

    def rest(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros where masters and moments rest."""
        if self.host is None:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.host(size * dtype.itemsize).view(dtype).zero_()

    def full_index(self, numel: int) -> Index:
        """The index of a tensor of which everything is kept."""
        if self.launch is None:
            return FullIndex(numel)
        return DeviceIndex(self.launch, "full", numel, numel, self.device)


HOST = Backend(torch.device("cpu"), None)


def to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Flat fp64 copies of tensors of one device, by one trip of the host to it."""
    flat = [part.detach().double().reshape(-1) for part in parts]
    if not flat:
        return []
    return list(torch.cat(flat).cpu().split([part.numel() for part in flat]))
