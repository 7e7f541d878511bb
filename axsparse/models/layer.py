"""A model is a list of layers; this is what such a list says.

Every rank knows the whole list, and builds only the layers of its own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["block", "embedding", "head"]
LossFunction = Callable[..., Tensor]
InitFunction = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer: how to build it, and what pruning and partitioning need to know of it.

    The module maps a tensor, or a tuple of tensors, to the same; its output is the
    next layer's input. A layer named "block3" with a parameter "fc1.weight" gives
    the global parameter name "block3.fc1.weight".
    """

    name: str
    """Unique in the model; letters, digits, '_', '-' and '.'."""
    build: Callable[[], nn.Module]
    """Makes the module. With `init` it runs on the meta device and costs no memory."""
    kind: Kind = "block"
    """Blocks are pruned by default, embeddings and heads only if asked for."""
    init: InitFunction | None = None
    """`init(parameter name, shape, generator)` returns the fp32 start values of one parameter.

    Without it `build` initialises the module itself, under a seed of (run seed, layer
    name) and with torch's global generator restored afterwards.
    """
    flops: float | None = None
    """Multiply-adds × 2 of one sample's forward pass; None counts 2 per parameter.
    Balances the stages and counts the model flops of a step."""
    random: bool = False
    """Whether the layer draws random numbers beyond torch's dropout modules, which are
    found without it."""


@dataclass(frozen=True)
class Tie:
    """Two parameters that are one weight, used in two layers.

    Both uses have a gradient of their own; the gradients are summed in this order
    before anything else, so that the result does not depend on the layout. Each stage
    makes the start values by itself, hence both layers need an `init`, and the same
    values from it for both parameters.
    """

    first: str
    """Global name of the earlier use; owns the master weights and the optimizer state."""
    second: str
    """Global name of the later use; its `build` makes a parameter of the same shape."""


@dataclass(frozen=True)
class Model:
    """A list of layers, its loss, and its ties."""

    layers: Sequence[Layer]
    loss: LossFunction
    """`loss(output, target)`: the *summed* loss of one microbatch, a scalar. The trainer
    divides by the step's global count of targets."""
    ties: Sequence[Tie] = ()
    name: str = "custom"
