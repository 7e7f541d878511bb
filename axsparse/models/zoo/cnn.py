"""A small convolutional network with batch normalisation, for images of a few pixels.

Shapes: B images of a microbatch, C channels, S pixels a side; inputs are (B, C, S, S) floats,
outputs are logits (B, classes).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.model_config import CnnConfig
from axsparse.models.layer import Layer, Model, count_top1
from axsparse.models.losses import summed_cross_entropy
from axsparse.models.zoo.initialization import normalised_convolution
from axsparse.models.zoo.wide_resnet import Head, init_head

WIDTHS = ((32, False), (64, True), (128, False), (128, True))
"""For each block, its output channels and whether it halves the sides."""


class Block(nn.Module):
    """3×3 convolution, batch normalisation, ReLU, and 2×2 max pooling if `halves`:
    (B, inputs, S, S) to (B, outputs, S, S) or (B, outputs, S/2, S/2)."""

    def __init__(self, inputs: int, outputs: int, *, halves: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(x, 2) if self.halves else x


def cnn(config: CnnConfig, image_size: int) -> Model:
    """The network of a configuration: 5 layers, 242,000 parameters for 10 classes.

    `image_size` is S; only the layers' costs depend on it.
    """
    layers: list[Layer] = []
    inputs = config.channels
    for number, (outputs, halves) in enumerate(WIDTHS):
        layers.append(
            Layer(
                f"block{number}",
                partial(Block, inputs, outputs, halves=halves),
                kind="block" if layers else "embedding",
                init=normalised_convolution,
            )
        )
        inputs = outputs
    layers.append(
        Layer(
            "head",
            partial(Head, inputs, config.num_classes),
            kind="head",
            init=partial(init_head, inputs),
        )
    )
    return Model(
        layers,
        summed_cross_entropy,
        name="cnn",
        metrics={"top1": count_top1},
        example=lambda samples: (
            torch.zeros(samples, config.channels, image_size, image_size, device="meta"),
        ),
    )
