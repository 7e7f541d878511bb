"""The whole optimizer step of one tensor in one kernel.

Unscale and clip, the recurrence in fp32 on kept entries (`samo/adamw.py`, `samo/sgd.py`),
downcast, and the dense weight written in whole tiles, pruned positions as zeros. No temporary.

Every operation and its rounding is that of torch on a CPU with fused multiply-add, so results
are the same bits, but for one: torch's square root there may be one unit off the rounded value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.cuda.helpers import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import NUMBERS, TILE, Argument, blocks_of, check
from axsparse.samo.memory import MasterKind
from axsparse.samo.optimizer import Hyper

MASTERS: dict[MasterKind, str] = {
    "weight": "MasterIsWeight",
    "fp32": "MasterBuffer",
    "remainder": "MasterRemainder",
}
"""How the source calls them."""


@dataclass(frozen=True)
class Slot:
    """One tensor's weight, gradient and state, all on one device."""

    index: DeviceIndex
    weight: Tensor
    """Dense, flat."""
    gradient: Tensor
    """Kept entries, in the weight's type or fp32."""
    master: Tensor | None
    """Of held entries, fp32; int16 for the remainder of a bf16 weight; None where the fp32 weight
    is its own master."""
    moments: tuple[Tensor, ...]
    """fp32, as many as the rule has, in its order."""
    held: range | None = None
    """The kept entries that are updated here, of which master and moments are; None: all.
    The others keep their weights."""

    @cached_property
    def master_kind(self) -> MasterKind:
        """Where the fp32 masters are."""
        if self.master is None:
            return "weight"
        return "remainder" if self.master.dtype == torch.int16 else "fp32"

    def run(
        self, kernel: str, moments: tuple[str, ...], found: Tensor | None, scalars: list[float]
    ) -> None:
        """Check sizes and types, and start one thread block a tile."""
        held = range(self.index.kept) if self.held is None else self.held
        assert 0 <= held.start <= held.stop <= self.index.kept, f"{held} of {self.index.kept}"
        kind = self.master_kind
        weights = {"weight": (torch.float32,), "remainder": (torch.bfloat16,)}.get(
            kind, (torch.bfloat16, torch.float16)
        )
        check(self.weight, "weight", weights, self.index.numel)
        check(self.gradient, "gradient", (self.weight.dtype, torch.float32), self.index.kept)
        if self.master is not None:
            check(self.master, "master", (torch.float32, torch.int16), len(held))
        assert len(self.moments) == len(moments), f"{len(self.moments)} moments, not {moments}"
        for name, values in zip(moments, self.moments, strict=True):
            check(values, name, (torch.float32,), len(held))
        if found is not None:
            check(found, "found", (torch.int32,), 1)
        weight, gradient = NUMBERS[self.weight.dtype], NUMBERS[self.gradient.dtype]
        types = f"{INDICES[self.index.kind]}, {weight}, {gradient}, {MASTERS[kind]}"
        # The kernel of a rule without moments still has a place for one.
        buffers: tuple[Argument, ...] = self.moments or (None,)
        self.index.launch(
            kernel.format(types=types),
            blocks_of(self.index.numel, TILE),
            self.weight,
            *self.index.arguments,
            self.gradient,
            self.master,
            *buffers,
            np.int64(held.start),
            np.int64(held.stop),
            found,
            *map(np.float32, scalars),
        )


def adamw_step(
    slot: Slot, hyper: Hyper, gradient_factor: float, found: Tensor | None = None
) -> None:
    """One step of AdamW; moments are its mean and mean square.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale). With `found` (int32,
    (1,), of a `Verdict`) at 1 nothing changes. Factors are rounded to fp32 as torch does it.
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
    slot.run("step_adamw<{types}>", ("exp_avg", "exp_avg_sq"), found, scalars)


def sgd_step(
    slot: Slot,
    hyper: Hyper,
    gradient_factor: float,
    found: Tensor | None = None,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """One step of SGD, with a moment unless `momentum` is 0; otherwise as `adamw_step`."""
    kind = ("NESTEROV" if nesterov else "PLAIN") if momentum else "NONE"
    scalars = [gradient_factor, hyper.weight_decay, momentum, -hyper.learning_rate]
    slot.run(f"step_sgd<{{types}}, {kind}>", ("momentum",) if momentum else (), found, scalars)
