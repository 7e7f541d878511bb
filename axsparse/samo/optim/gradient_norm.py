"""The norm of the gradient, from partial sums over blocks of entries that no layout changes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from axsparse.samo.cuda.compress_kernel import judge
from axsparse.samo.layer_state import LayerState
from axsparse.samo.shards import BLOCK
from axsparse.samo.tensor_state import TensorState


def norm_partials(layers: Iterable[LayerState], names: Iterable[str]) -> dict[str, Tensor]:
    """By tensor name, one fp64 sum of squares for each block of kept gradient entries, `(blocks,)`,
    on the device of the gradients; zero for the blocks of other replicas' shares.

    A sum is non-finite exactly if a gradient entry of its block is: squares of fp32 values cannot
    overflow fp64. Only tensors in `names` are counted; the second use of a tied weight is counted
    on the stage of the first.
    """
    wanted = set(names)
    return {
        tensor.name: _squares(layer, tensor)
        for layer in layers
        for tensor in layer.owned
        if tensor.name in wanted
    }


def _squares(layer: LayerState, tensor: TensorState) -> Tensor:
    """The sums of one tensor: those that came with its last gradient if they still hold, otherwise
    newly computed ones."""
    if tensor.partials is not None:
        return tensor.partials
    gradient_K, launch = layer.gradient_of(tensor), layer.backend.launch
    blocks = -(-tensor.kept // BLOCK)
    sums = torch.zeros(blocks, dtype=torch.float64, device=gradient_K.device)
    if launch is None:
        for start, stop in layer.shares.blocks(tensor, layer.shares.own):
            sums[start // BLOCK] = gradient_K[start:stop].double().square_().sum()
    elif own := tensor.entries_in(layer.shares.own):
        own_sums = sums[own.start // BLOCK : -(-own.stop // BLOCK)]
        judge(launch, gradient_K[own.start : own.stop], own_sums)
    return sums


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
