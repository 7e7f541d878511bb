"""What all gradients are multiplied by: the norm that clips them, and the loss scale.

The norm is made of partial sums over blocks of entries, which no layout changes.

Dynamic loss scaling (Micikevicius et al. 2018) keeps small fp16 gradients from becoming zero. The
backward starts from `scale` instead of 1, the update divides by it. A step with a non-finite
gradient anywhere is skipped by all ranks and halves the scale; a run of `growth_interval` good
steps doubles it. Powers of two, so that scaling rounds nothing. Only kept entries count: a gradient
that overflows at a pruned position is dropped by the compression before gradients are checked, and
affects nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.samo.cuda.kernels import judge
from axsparse.samo.host.host_step import sum_of_squares
from axsparse.samo.layer_state import LayerState
from axsparse.samo.shards import BLOCK

FACTOR = 2.0
HIGHEST = 2.0**24
"""The scale stops growing here: beyond it a loss of 1 overflows long before it underflows."""


def norm_partials(layers: Iterable[LayerState], names: Iterable[str]) -> dict[str, Tensor]:
    """By tensor name, one fp64 sum of squares for each block of kept gradient entries, `(blocks,)`,
    on the device of the gradients; zero for the blocks of other replicas' shares.

    A sum is non-finite exactly if a gradient entry of its block is: squares of fp32 values cannot
    overflow fp64. Only tensors in `names` are counted; the second use of a tied weight is counted
    on the stage of the first. On a GPU few kernels sum all tensors together, since most of them are
    small.
    """
    chosen = set(names)
    counted = [(layer, t) for layer in layers for t in layer.owned if t.name in chosen]
    if not counted:
        return {}
    backend = counted[0][0].backend
    sizes = [-(-tensor.kept // BLOCK) for _, tensor in counted]
    room = torch.zeros(sum(sizes), dtype=torch.float64, device=backend.device).split(sizes)
    parts: list[tuple[Tensor, Tensor]] = []
    for (layer, tensor), sums in zip(counted, room, strict=True):
        gradient_K, shares = layer.gradient_of(tensor), layer.shares
        if backend.launch is None:
            for start, stop in shares.blocks(tensor, shares.own):
                sums[start // BLOCK] = sum_of_squares(gradient_K[start:stop])
        elif own := tensor.entries_in(shares.own):
            blocks = sums[own.start // BLOCK : -(-own.stop // BLOCK)]
            parts.append((gradient_K[own.start : own.stop], blocks))
    if backend.launch is not None:
        judge(backend.launch, parts)
    return {tensor.name: sums for (_, tensor), sums in zip(counted, room, strict=True)}


def global_norm(partials: Tensor, loss_scale: float = 1.0) -> float:
    """The norm from all partials in (name, block) order, rounded to fp32 before any use."""
    norm = math.sqrt(float(partials.sum())) / loss_scale
    return float(torch.tensor(norm, dtype=torch.float32))


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor that clips gradients: min(1, clip_norm / (norm + 1e-6)), as in
    `torch.nn.utils.clip_grad_norm_` and in fp32 as there; 1 if `clip_norm` is 0.
    """
    if clip_norm == 0:
        return 1.0
    limit = torch.tensor(clip_norm, dtype=torch.float32)
    factor = limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(factor, max=1.0))


@dataclass
class LossScale:
    """The scale and its history; the same on every rank, since all ranks agree on every step."""

    scale: float
    floor: float
    """The scale never falls below it."""
    growth_interval: int | None
    """Good steps in a row that double the scale; None keeps it as it is (bf16, fp32)."""
    patience: int
    """Skipped steps in a row at the floor after which a run is lost."""
    good_steps: int = 0
    """Good steps in a row since the scale last changed."""
    skipped_at_floor: int = 0
    """Steps since the last good one that were skipped at the floor or for their loss."""

    @staticmethod
    def none(patience: int) -> LossScale:
        """No scaling: bf16 and fp32 have the range of fp32."""
        return LossScale(scale=1.0, floor=1.0, growth_interval=None, patience=patience)

    def update(self, *, finite: bool, loss_is_finite: bool = True) -> None:
        """Adapt the scale to how a step went: `finite` if all gradients and the loss were.

        A loss that is not finite itself counts as if the scale were at the floor: the scale does
        not enter the forward, so a lower one does not help.
        """
        if finite:
            self.skipped_at_floor = 0
            self.good_steps += 1
            if self.growth_interval is not None and self.good_steps == self.growth_interval:
                self.good_steps = 0
                self.scale = min(self.scale * FACTOR, HIGHEST)
            return
        self.good_steps = 0
        if self.scale <= self.floor or not loss_is_finite:
            self.skipped_at_floor += 1
        self.scale = max(self.scale / FACTOR, self.floor)

    @property
    def exhausted(self) -> bool:
        """Whether the run is lost: too many skipped steps in a row at the floor."""
        return self.skipped_at_floor >= self.patience
