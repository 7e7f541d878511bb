"""Start values of convolutional networks, after He et al. 2015 and torchvision.

The weight of a convolution is (outputs, inputs, height, width).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def he_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 2 / fan-out), which keeps the size of gradients through ReLUs (eq. 14)."""
    fan_out = shape[0] * math.prod(shape[2:])
    return torch.empty(shape).normal_(0.0, math.sqrt(2 / fan_out), generator=generator)


def uniform_by_inputs(shape: tuple[int, ...], inputs: int, generator: torch.Generator) -> Tensor:
    """U(−1/√inputs, 1/√inputs), as torch initialises weights and biases of linear layers."""
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def normalised_convolution(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init` for convolutions without bias and batch normalisations."""
    if len(shape) > 1:
        return he_normal(shape, generator)
    return torch.full(shape, 1.0 if name.endswith("weight") else 0.0)
