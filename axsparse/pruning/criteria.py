"""Which entries of one tensor are kept: scores in, a mask with an exact count out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from axsparse.models.layer import Kind
from axsparse.seeds import keyed_generator


def kept_entries(numel: int, sparsity: float) -> int:
    """How many of a tensor's entries stay: numel − round(sparsity · numel), exactly."""
    return numel - round(sparsity * numel)


def largest(score: Tensor, keep: int) -> Tensor:
    """The flat mask of the `keep` largest scores; among equal ones, lower positions first.

    `score` is 1-D fp32 without NaN. Selection, not sorting: linear in the entries.
    """
    numel = score.numel()
    if keep >= numel:
        return torch.ones(numel, dtype=torch.bool)
    if keep == 0:
        return torch.zeros(numel, dtype=torch.bool)
    values = score.numpy()
    threshold = np.partition(values, numel - keep)[numel - keep]
    mask = values > threshold
    ties = np.flatnonzero(values == threshold)
    mask[ties[: keep - int(mask.sum())]] = True
    return torch.from_numpy(mask)


@dataclass(frozen=True)
class Criterion:
    """Which tensors are pruned, to which count, by which score."""

    method: Literal["magnitude", "random"]
    sparsity: float
    include: Literal["blocks", "all"]
    seed: int

    def prunes(self, kind: Kind, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this kind of layer is pruned; vectors (biases, norms) never are."""
        wanted = kind == "block" or self.include == "all"
        return wanted and len(shape) >= 2 and self.sparsity > 0

    def kept(self, numel: int) -> int:
        """Entries that stay in a pruned tensor."""
        return kept_entries(numel, self.sparsity)

    def mask(self, name: str, weight: Callable[[], Tensor], numel: int) -> Tensor:
        """The flat mask of one tensor: a function of its fp32 weights, or of seed and name.

        `weight()` gives the flat fp32 weights; the random method never asks for them.
        """
        if self.method == "random":
            generator = keyed_generator(self.seed, name, "mask")
            score = torch.rand(numel, generator=generator)
        else:
            score = weight().abs()
        return largest(score, self.kept(numel))
