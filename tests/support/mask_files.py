"""Small mask files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.pruning.mask_file import write_masks
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport

PRUNED = {
    "block0.fc.weight": (5, 4),
    "block1.fc.weight": (4, 4),
    "block2.conv.weight": (2, 1, 3, 3),
}
"""Tensors of 20, 16 and 18 entries."""


def some_masks() -> dict[str, Tensor]:
    """Flat masks of about a third, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.rand(torch.Size(shape).numel(), generator=generator) < 0.3
        for name, shape in PRUNED.items()
    }


def given(mask: Tensor) -> Tensor:
    return mask


def small_mask_file(folder: Path) -> Path:
    """Bits, written by one rank."""
    path = folder / "mask.safetensors"
    own = {name: partial(given, mask) for name, mask in some_masks().items()}
    transport = LocalTransport()
    write_masks(path, PRUNED, own, transport=transport, coords=Grid(1, 1).coords(0))
    return path
