"""The whole optimizer step of a layer's tensors, in one kernel for those of the same types.

The kernel unscales and clips the gradient, applies the recurrence in fp32 to kept entries (as in
`samo/optim/adamw.py` and `samo/optim/sgd.py`), rounds the masters, and writes the dense weight in
whole tiles, with zeros at pruned positions. It needs no temporary.

Every operation and its rounding is that of torch on a CPU with fused multiply-add, so results have
the same bits, with one exception: torch's square root may be one unit off the rounded value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.device_index import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import GROUP, NUMBERS, TENSORS, TILE, blocks_of, check, pointer
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.state_bytes import MasterKind

MASTERS: dict[MasterKind, str] = {
    "weight": "MasterIsWeight",
    "fp32": "MasterBuffer",
    "remainder": "MasterRemainder",
}
"""The names of the master kinds in the source."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's weight, gradient and state, all on one device."""

    index: DeviceIndex
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
    def types(self) -> str:
        """The template arguments of the kernel for this tensor."""
        weight, gradient = NUMBERS[self.weight.dtype], NUMBERS[self.gradient.dtype]
        return f"{INDICES[self.index.kind]}, {weight}, {gradient}, {MASTERS[self._master_kind]}"

    @property
    def _master_kind(self) -> MasterKind:
        if self.master is None:
            return "weight"
        return "remainder" if self.master.dtype == torch.int16 else "fp32"

    def check(self, moments: tuple[str, ...]) -> None:
        """Assert sizes and types, which the kernel does not check."""
        assert 0 <= self.held.start <= self.held.stop <= self.index.kept, f"{self.held}"
        weights = {"weight": (torch.float32,), "remainder": (torch.bfloat16,)}.get(
            self._master_kind, (torch.bfloat16, torch.float16)
        )
        check(self.weight, "weight", weights, self.index.numel)
        check(self.gradient, "gradient", (self.weight.dtype, torch.float32), self.index.kept)
        if self.master is not None:
            check(self.master, "master", (torch.float32, torch.int16), len(self.held))
        assert len(self.moments) == len(moments), f"{len(self.moments)} moments, not {moments}"
        for name, values in zip(moments, self.moments, strict=True):
            check(values, name, (torch.float32,), len(self.held))

    def packed(self, block: int) -> tuple[int, ...]:
        """The fields of a TENSOR whose first thread block has number `block`."""
        index, moments = self.index, (*self.moments, None, None)
        return (
            self.weight.data_ptr(),
            pointer(index.entries),
            pointer(index.offsets),
            index.kept,
            index.numel,
            self.gradient.data_ptr(),
            pointer(self.master),
            pointer(moments[0]),
            pointer(moments[1]),
            self.held.start,
            self.held.stop,
            block,
        )


def _step(
    slots: Sequence[TensorSlot], kernel: str, moments: tuple[str, ...], scalars: Sequence[float]
) -> None:
    """Start a thread block for each tile of each tensor, up to GROUP tensors at a time."""
    alike: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        slot.check(moments)
        alike.setdefault(slot.types, []).append(slot)
    factors = [np.float32(scalar) for scalar in scalars]
    for types, those in alike.items():
        for first in range(0, len(those), GROUP):
            tensors, blocks = [], 0
            for slot in those[first : first + GROUP]:
                tensors.append(slot.packed(blocks))
                blocks += blocks_of(slot.index.numel, TILE)
            group = np.zeros(1, TENSORS)
            group["tensors"][0, : len(tensors)] = tensors
            group["number"] = len(tensors)
            those[0].index.launch(kernel.format(types=types), blocks, group, *factors)


def adamw_step(slots: Sequence[TensorSlot], hyper: Hyper, gradient_factor: float) -> None:
    """One step of AdamW; the moments are `exp_avg` and `exp_avg_sq`.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale). Factors are computed
    in fp64 and rounded to fp32, as torch does.
    """
    beta1, beta2 = hyper.betas
    scalars = [
        gradient_factor,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - hyper.learning_rate * hyper.weight_decay,
        math.sqrt(1 - beta2**hyper.step),
        hyper.eps,
        -hyper.learning_rate / (1 - beta1**hyper.step),
    ]
    _step(slots, "step_adamw<{types}>", ("exp_avg", "exp_avg_sq"), scalars)


def sgd_step(
    slots: Sequence[TensorSlot],
    hyper: Hyper,
    gradient_factor: float,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """One step of SGD, whose only moment is `momentum`, or none if that is 0; otherwise as
    `adamw_step`."""
    kind = ("NESTEROV" if nesterov else "PLAIN") if momentum else "NONE"
    scalars = [gradient_factor, hyper.weight_decay, momentum, -hyper.learning_rate]
    _step(slots, f"step_sgd<{{types}}, {kind}>", ("momentum",) if momentum else (), scalars)
