"""A model is a list of layers; this is what such a list says.

Every rank knows the whole list, and builds only the layers of its own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axsparse.runtime.errors import ConfigError

Kind = Literal["block", "embedding", "head"]
LossFunction = Callable[..., Tensor]
MetricFunction = Callable[..., Tensor]
InitFunction = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


class StartValues(Protocol):
    """Where a model starts instead of at random: at the values of a file, say."""

    @property
    def fingerprint(self) -> str:
        """Equal where the values are; ranks compare it."""
        ...

    def read(self, name: str) -> Tensor | None:
        """The values of the parameter or buffer of a global name, read anew at each call.

        Parameters have values, of their shape, all of them; None for a buffer that starts
        as it would without.
        """
        ...


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
    """Makes the module, a new one in every call; every rank calls it for every layer, on the meta
    device, and for its own layers once more. With `init` it runs there only and costs no memory."""
    kind: Kind = "block"
    """Blocks are pruned by default, embeddings and heads only if asked for."""
    init: InitFunction | None = None
    """`init(parameter name, shape, generator)` returns the fp32 start values of one parameter.

    Without it `build` initialises the module itself, under a seed of (run seed, layer
    name) and with torch's global generator restored afterwards.
    """
    flops: float | None = None
    """Multiply-adds × 2 of one sample's forward pass; None counts them on `Model.example`, and
    without that 2 a parameter. Balances the stages and counts the model flops of a step."""
    random: bool = False
    """Whether the layer draws random numbers beyond torch's dropout modules, which are
    found without it."""


class _NoDraws(TorchFunctionMode):
    """Draws no normal distribution for a tensor without memory: torch would load its compiler
    for that, which takes every rank two seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def on_meta(layer: Layer) -> nn.Module:
    """The module of a layer without memory and start values; raises what `build` does."""
    with torch.device("meta"), _NoDraws():
        return layer.build()


def as_tuple(name: str, output: object) -> tuple[Tensor, ...]:
    """What the forward of a layer gave; ConfigError if that is no tensor and no tuple of them."""
    given = (output,) if isinstance(output, Tensor) else output
    if isinstance(given, (tuple, list)) and all(isinstance(t, Tensor) for t in given):
        for tensor in given:
            if tensor.layout != torch.strided or tensor.is_complex():
                what = "a complex" if tensor.is_complex() else "a sparse"
                raise ConfigError(
                    f"layer {name}: its forward returned {what} tensor, which does not travel "
                    "between stages; return dense tensors of real numbers (torch.view_as_real, "
                    "to_dense)"
                )
        return tuple(given)
    raise ConfigError(
        f"layer {name}: its forward returned {type(output).__name__}; "
        "return a tensor or a tuple of tensors"
    )


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
    divides by the step's global count of targets. A loss that compares samples sees those of one
    microbatch, whose size is then part of the model. Where the last layer returns a tuple,
    `loss(*outputs, target)`: a head of many words returns its hidden states and its weight,
    and `models.losses.linear_cross_entropy` makes the logits of some words at a time."""
    ties: Sequence[Tie] = ()
    name: str = "custom"
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    """What an evaluation reports beside the loss: `metric(output, target)` counts the targets of
    one microbatch that are right, and the fraction of all is shown under the metric's name."""
    example: Callable[[int], tuple[Tensor, ...]] | None = None
    """`example(samples)`: what the first layer gets, of any values. With it, layers are run on the
    meta device, where stages find what they cost in flops and in activations; without it, a
    layer without `flops` counts by its parameters."""
    start: StartValues | None = None
    """Values that parameters and buffers start at, before those of any layer's `init`."""
    vocab_size: int | None = None
    """Words that it knows, which those of the data may not exceed; None: it does not say."""


def count_top1(logits: Tensor, targets: Tensor) -> Tensor:
    """Samples whose largest logit is that of their class: (B, classes) and (B,) to a scalar.

    Of equal logits one counts; a sample with a logit that is no number is never right.
    """
    numbers = ~logits.isnan().any(dim=-1)
    return ((logits.argmax(dim=-1) == targets) & numbers).sum()
