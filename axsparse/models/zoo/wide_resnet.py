"""Wide ResNets (Zagoruyko & Komodakis 2016) with bottlenecks, as torchvision defines them.

Shapes: B images of a microbatch, C channels, S pixels a side; inputs are (B, 3, S, S) floats,
outputs are logits (B, classes). Each residual block is one layer, so that no residual
connection crosses two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.model_config import WideResnetConfig
from axsparse.models.layer import Layer, Model, count_top1
from axsparse.models.losses import summed_cross_entropy
from axsparse.models.zoo.initialization import normalised_convolution, uniform_by_inputs

RESNET101 = (3, 4, 23, 3)
"""Number of blocks in each group. The first block of every group but the first halves the
sides."""
WIDTH = 64
"""Channels of the stem, and of the first group's bottlenecks at factor 1."""
EXPANSION = 4
"""Output channels of a block, as a multiple of its bottleneck's channels at factor 1."""
STEM = "stem."
"""The prefix that the stem's parameters have here, and not in torchvision."""


class Stem(nn.Module):
    """7×7 convolution and pooling: (B, 3, S, S) to (B, C, S/4, S/4)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, outputs, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut: (B, C, S, S) to (B, outputs, S', S').

    The 3×3 convolution has the stride. In the first block of a group, where shapes change, the
    shortcut is a 1×1 convolution.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if first:
            self.downsample.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)))
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        return F.relu(self.bn3(self.conv3(hidden)) + self.downsample(x))


class Head(nn.Module):
    """Mean over the pixels, and a linear layer: (B, C, S, S) to (B, classes)."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, inputs))
        self.bias = nn.Parameter(torch.empty(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mean(dim=(2, 3)), self.weight, self.bias)


def init_head(inputs: int, _: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init` for `Head`, as torch initialises linear layers."""
    return uniform_by_inputs(shape, inputs, generator)


def wide_resnet(
    groups: Sequence[int], *, width: int, factor: int, num_classes: int, image_size: int
) -> Model:
    """A wide ResNet: a stem, groups of bottlenecks, and the classes.

    `groups` are the numbers of blocks, `width` the channels of the stem; the bottlenecks are
    `factor` times as wide as a ResNet's. `image_size` is S; only the layers' costs depend on it.
    """
    init = normalised_convolution
    layers = [Layer("stem", partial(Stem, width), kind="embedding", init=init)]
    inputs = width
    for group, blocks in enumerate(groups):
        inner = width * factor * 2**group
        outputs = width * EXPANSION * 2**group
        for number in range(blocks):
            first = number == 0
            stride = 2 if first and group else 1
            layers.append(
                Layer(
                    f"layer{group + 1}.{number}",
                    partial(Bottleneck, inputs, inner, outputs, stride, first=first),
                    init=init,
                )
            )
            inputs = outputs
    layers.append(
        Layer(
            "fc",
            partial(Head, inputs, num_classes),
            kind="head",
            init=partial(init_head, inputs),
        )
    )
    return Model(
        layers,
        summed_cross_entropy,
        name="wide_resnet",
        metrics={"top1": count_top1},
        example=lambda samples: (torch.zeros(samples, 3, image_size, image_size, device="meta"),),
    )


def wide_resnet101_2(config: WideResnetConfig, image_size: int) -> Model:
    """WideResNet-101-2 of a configuration: 35 layers, 126,886,696 parameters for 1000 classes."""
    return wide_resnet(
        RESNET101, width=WIDTH, factor=2, num_classes=config.num_classes, image_size=image_size
    )


def torchvision_name(name: str) -> str:
    """The name of a parameter or buffer in torchvision: the same without the stem's prefix."""
    return name.removeprefix(STEM)


def name_of_torchvision(name: str) -> str:
    """The global name of a parameter or buffer, from its name in torchvision."""
    return f"{STEM}{name}" if name.startswith(("conv1.", "bn1.")) else name
