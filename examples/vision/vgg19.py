"""VGG-19 (Simonyan & Zisserman 2015) without batch normalisation, under torchvision's names.

mpirun -n 4 python examples/vision/vgg19.py data/imagenet
mpirun -n 4 python examples/vision/vgg19.py data/imagenet train.steps=1000 layout.g_inter=2
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from photos import classifier, he_normal, train
from torch import Tensor, nn

import axsparse as ax

VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)
"""Channels of each 3×3 convolution; a pooling ends each group (table 1, column E)."""
POOLED = 7
"""Pixels on each side that the classifier gets."""


class Convolution(nn.Conv2d):
    """3×3 convolution, ReLU, and 2×2 max pooling if `halves`."""

    def __init__(self, inputs: int, outputs: int, *, halves: bool) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(super().forward(x))
        return F.max_pool2d(x, 2) if self.halves else x


class Hidden(nn.Linear):
    """Linear layer, ReLU and dropout; images are averaged to POOLED pixels a side first."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = F.adaptive_avg_pool2d(x, POOLED).flatten(1)
        dropped: Tensor = self.dropout(F.relu(super().forward(x)))
        return dropped


def init(_: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Start values as torchvision's: `he_normal`, N(0, 0.01²) for matrices, 0 for biases."""
    if len(shape) == 4:
        return he_normal(shape, generator)
    std = 0.01 if len(shape) == 2 else 0.0
    return torch.zeros(shape).normal_(0.0, std, generator=generator)


def vgg(
    groups: Sequence[Sequence[int]], size: int, *, hidden: int, classes: int, dropout: float = 0.5
) -> ax.Model:
    """A VGG: convolutions with the channels of `groups`, two hidden layers, and the classes."""
    layers: list[ax.Layer] = []
    inputs, number = 3, 0
    for group in groups:
        for place, outputs in enumerate(group):
            build = partial(Convolution, inputs, outputs, halves=place == len(group) - 1)
            layers.append(
                ax.Layer(
                    f"features.{number}",
                    build,
                    kind="block" if layers else "embedding",
                    init=init,
                )
            )
            inputs = outputs
            number += 2  # torchvision numbers the ReLU, too.
        number += 1  # It also numbers the pooling.
    inputs *= POOLED**2
    for name in ("classifier.0", "classifier.3"):
        layers.append(ax.Layer(name, partial(Hidden, inputs, hidden, dropout), init=init))
        inputs = hidden
    head = partial(nn.Linear, hidden, classes)
    return classifier(
        "vgg", [*layers, ax.Layer("classifier.6", head, kind="head", init=init)], size
    )


def vgg19(size: int) -> ax.Model:
    """VGG-19: 19 layers, 143,667,240 parameters."""
    return vgg(VGG19, size, hidden=4096, classes=1000)


if __name__ == "__main__":
    train(vgg19, Path(__file__).with_suffix(".yaml"))
