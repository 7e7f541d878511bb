"""The norm of all gradients, and clipping by it.

The norm is made of partial sums over blocks of entries, which no layout changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from axsparse.samo.cuda.kernels import sum_squares
from axsparse.samo.host.host_step import sum_of_squares
from axsparse.samo.layer_state import LayerState
from axsparse.samo.shards import BLOCK


def norm_partials(layers: Iterable[LayerState], names: Iterable[str]) -> dict[str, Tensor]:
    """By tensor name, one fp64 sum of squares for each block of kept gradient entries, `(blocks,)`,
    on the device of the gradients; zero for the blocks of other replicas' shares.

    A sum is non-finite exactly if a gradient entry of its block is: squares of fp32 values cannot
    overflow fp64. Only tensors in `names` are counted, and of tied weights the first use. On a GPU
    few kernels sum all tensors together, since most of them are small.
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
        sum_squares(backend.launch, parts)
    return {tensor.name: sums for (_, tensor), sums in zip(counted, room, strict=True)}


def global_norm(partials: Tensor, loss_scale: float = 1.0) -> float:
    """The norm from all partials in (name, block) order, rounded to fp32 before any use."""
    norm = math.sqrt(float(partials.sum())) / loss_scale
    return float(torch.tensor(norm, dtype=torch.float32))


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor that clips gradients: min(1, clip_norm / (norm + 1e-6)) in fp32, as in
    `torch.nn.utils.clip_grad_norm_`; 1 if `clip_norm` is 0."""
    if clip_norm == 0:
        return 1.0
    limit = torch.tensor(clip_norm, dtype=torch.float32)
    factor = limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(factor, max=1.0))
