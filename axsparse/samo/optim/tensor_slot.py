"""One tensor's weight, gradient and state, as whole-step functions take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.samo.cuda.launch import check
from axsparse.samo.index.base import Index
from axsparse.samo.state_bytes import MasterKind


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's weight, gradient and state, all on one device."""

    index: Index
    weight: Tensor
    """Dense, flat."""
    gradient: Tensor
    """Kept entries, in the weight's type or fp32."""
    master: Tensor | None
    """The masters of the held entries: fp32; int16 for the remainders of a bf16 weight; None if the
    fp32 weight is its own master."""
    moments: tuple[Tensor, ...]
    """The rule's moments of the held entries, fp32, in its order."""
    held: range
    """The kept entries that have their masters and moments here and are updated. The others keep
    their weights."""

    @property
    def master_kind(self) -> MasterKind:
        """Where the masters are."""
        if self.master is None:
            return "weight"
        return "remainder" if self.master.dtype == torch.int16 else "fp32"

    def check(self, moments: tuple[str, ...]) -> None:
        """Assert sizes and types, which neither kernels nor compiled loops check."""
        on_device = self.index.on_device
        numel = self.weight.numel() if on_device is None else on_device.numel
        assert 0 <= self.held.start <= self.held.stop <= self.index.kept, f"{self.held}"
        weights = {"weight": (torch.float32,), "remainder": (torch.bfloat16,)}.get(
            self.master_kind, (torch.bfloat16, torch.float16)
        )
        check(self.weight, "weight", weights, numel)
        check(self.gradient, "gradient", (self.weight.dtype, torch.float32), self.index.kept)
        if self.master is not None:
            check(self.master, "master", (torch.float32, torch.int16), len(self.held))
        assert len(self.moments) == len(moments), f"{len(self.moments)} moments, not {moments}"
        for name, values in zip(moments, self.moments, strict=True):
            check(values, name, (torch.float32,), len(self.held))
