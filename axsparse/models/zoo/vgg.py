"""VGG (Simonyan & Zisserman 2015) without batch normalisation, with torchvision's names.

Shapes: B images of a microbatch, C channels, S pixels a side; inputs are (B, 3, S, S) floats,
outputs are logits (B, classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.model_config import Vgg19Config
from axsparse.models.layer import Layer, Model, count_top1
from axsparse.models.losses import summed_cross_entropy
from axsparse.models.zoo.initialization import he_normal

VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)
"""Channels of each 3×3 convolution, group by group; each group ends with a pooling that halves
the sides (table 1, column E)."""
HIDDEN = 4096
"""Outputs of each hidden layer of the classifier."""
POOLED = 7
"""Pixels on each side that the classifier gets."""
HIDDEN_STD = 0.01
"""Standard deviation of the classifier's initial matrices."""


class Convolution(nn.Module):
    """3×3 convolution, ReLU, and 2×2 max pooling if `halves`: (B, C, S, S) to
    (B, outputs, S, S) or (B, outputs, S/2, S/2)."""

    def __init__(self, inputs: int, outputs: int, *, halves: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.weight, self.bias, padding=1))
        return F.max_pool2d(x, 2) if self.halves else x


class Hidden(nn.Module):
    """Linear layer, ReLU and dropout: (B, inputs) to (B, outputs).

    Images (B, C, S, S) are averaged to POOLED pixels on each side and flattened first.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = F.adaptive_avg_pool2d(x, POOLED).flatten(1)
        dropped: Tensor = self.dropout(F.relu(F.linear(x, self.weight, self.bias)))
        return dropped


def init_parameter(_: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Start values: convolutions as `he_normal`, matrices N(0, 0.01²), biases 0."""
    if len(shape) == 4:
        return he_normal(shape, generator)
    if len(shape) == 2:
        return torch.empty(shape).normal_(0.0, HIDDEN_STD, generator=generator)
    return torch.zeros(shape)


def vgg(
    groups: Sequence[Sequence[int]],
    *,
    hidden: int,
    num_classes: int,
    image_size: int,
    dropout: float,
) -> Model:
    """A VGG: convolutions with the channels of `groups`, two hidden layers, and the classes.

    `image_size` is S; only the layers' costs depend on it.
    """
    layers: list[Layer] = []
    inputs, number = 3, 0
    for group in groups:
        for place, outputs in enumerate(group):
            layers.append(
                Layer(
                    f"features.{number}",
                    partial(Convolution, inputs, outputs, halves=place == len(group) - 1),
                    kind="block" if layers else "embedding",
                    init=init_parameter,
                )
            )
            inputs = outputs
            number += 2  # torchvision numbers the ReLU, too.
        number += 1  # It also numbers the pooling.
    inputs *= POOLED**2
    for name in ("classifier.0", "classifier.3"):
        layers.append(
            Layer(
                name,
                partial(Hidden, inputs, hidden, dropout),
                init=init_parameter,
            )
        )
        inputs = hidden
    layers.append(
        Layer(
            "classifier.6",
            partial(nn.Linear, hidden, num_classes),
            kind="head",
            init=init_parameter,
        )
    )
    return Model(
        layers,
        summed_cross_entropy,
        name="vgg",
        metrics={"top1": count_top1},
        example=lambda samples: (torch.zeros(samples, 3, image_size, image_size, device="meta"),),
    )


def vgg19(config: Vgg19Config, image_size: int) -> Model:
    """VGG-19 of a configuration: 19 layers, 143,667,240 parameters for 1000 classes."""
    return vgg(
        VGG19,
        hidden=HIDDEN,
        num_classes=config.num_classes,
        image_size=image_size,
        dropout=config.dropout,
    )
