"""Convolutional networks: VGG-19, WideResNet-101-2, and a small one for images of a few pixels.

VGG (Simonyan & Zisserman 2015) has no batch normalisation here. Wide ResNets (Zagoruyko & Komodakis
2016) have bottlenecks, each of which is one layer, so that no residual connection crosses two
stages. The names of both are torchvision's, but for the prefix `STEM`.

Shapes: B images of a microbatch, C channels, S pixels a side; inputs are (B, C, S, S) floats,
outputs are logits (B, classes). The weight of a convolution is (outputs, inputs, height, width).
The `image_size` of a model is S; only the layers' costs depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.model_config import CnnConfig, Vgg19Config, WideResnetConfig
from axsparse.models.layer import Kind, Layer, Model, count_top1
from axsparse.models.losses import summed_cross_entropy

# -- start values, after He et al. 2015 and torchvision ---------------------------------


def he_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 2 / fan-out), which keeps the size of gradients through ReLUs (eq. 14)."""
    fan_out = shape[0] * math.prod(shape[2:])
    return torch.empty(shape).normal_(0.0, math.sqrt(2 / fan_out), generator=generator)


def init_normalised(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init` for convolutions without bias and batch normalisations."""
    if len(shape) > 1:
        return he_normal(shape, generator)
    return torch.full(shape, 1.0 if name.endswith("weight") else 0.0)


def init_vgg(_: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init` for VGG: convolutions as `he_normal`, matrices N(0, 0.01²), biases 0."""
    if len(shape) == 4:
        return he_normal(shape, generator)
    if len(shape) == 2:
        return torch.empty(shape).normal_(0.0, 0.01, generator=generator)
    return torch.zeros(shape)


def init_head(inputs: int, _: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init` for `Head`, as torch initialises linear layers: U(−1/√inputs, 1/√inputs)."""
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class Head(nn.Linear):
    """Mean over the pixels, and a linear layer: (B, C, S, S) to (B, classes)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(dim=(2, 3)))


def _model(name: str, layers: Sequence[Layer], channels: int, image_size: int) -> Model:
    return Model(
        layers,
        summed_cross_entropy,
        name=name,
        metrics={"top1": count_top1},
        example=lambda samples: (
            torch.zeros(samples, channels, image_size, image_size, device="meta"),
        ),
    )


def _head(name: str, inputs: int, num_classes: int) -> Layer:
    init = partial(init_head, inputs)
    return Layer(name, partial(Head, inputs, num_classes), kind="head", init=init)


# -- the small network ------------------------------------------------------------------

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
    """The small network: 5 layers, 242,000 parameters for 10 classes."""
    layers: list[Layer] = []
    inputs = config.channels
    for number, (outputs, halves) in enumerate(WIDTHS):
        build = partial(Block, inputs, outputs, halves=halves)
        kind: Kind = "block" if layers else "embedding"
        layers.append(Layer(f"block{number}", build, kind=kind, init=init_normalised))
        inputs = outputs
    layers.append(_head("head", inputs, config.num_classes))
    return _model("cnn", layers, config.channels, image_size)


# -- VGG --------------------------------------------------------------------------------

VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)
"""Channels of each 3×3 convolution, group by group; each group ends with a pooling that halves
the sides (table 1, column E)."""
HIDDEN = 4096
"""Outputs of each hidden layer of the classifier."""
POOLED = 7
"""Pixels on each side that the classifier gets."""


class Convolution(nn.Conv2d):
    """3×3 convolution, ReLU, and 2×2 max pooling if `halves`: (B, C, S, S) to
    (B, outputs, S, S) or (B, outputs, S/2, S/2)."""

    def __init__(self, inputs: int, outputs: int, *, halves: bool) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(super().forward(x))
        return F.max_pool2d(x, 2) if self.halves else x


class Hidden(nn.Linear):
    """Linear layer, ReLU and dropout: (B, inputs) to (B, outputs).

    Images (B, C, S, S) are averaged to POOLED pixels on each side and flattened first.
    """

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = F.adaptive_avg_pool2d(x, POOLED).flatten(1)
        dropped: Tensor = self.dropout(F.relu(super().forward(x)))
        return dropped


def vgg(
    groups: Sequence[Sequence[int]],
    *,
    hidden: int,
    num_classes: int,
    image_size: int,
    dropout: float,
) -> Model:
    """A VGG: convolutions with the channels of `groups`, two hidden layers, and the classes."""
    layers: list[Layer] = []
    inputs, number = 3, 0
    for group in groups:
        for place, outputs in enumerate(group):
            build = partial(Convolution, inputs, outputs, halves=place == len(group) - 1)
            kind: Kind = "block" if layers else "embedding"
            layers.append(Layer(f"features.{number}", build, kind=kind, init=init_vgg))
            inputs = outputs
            number += 2  # torchvision numbers the ReLU, too.
        number += 1  # It also numbers the pooling.
    inputs *= POOLED**2
    for name in ("classifier.0", "classifier.3"):
        layers.append(Layer(name, partial(Hidden, inputs, hidden, dropout), init=init_vgg))
        inputs = hidden
    build_head = partial(nn.Linear, hidden, num_classes)
    layers.append(Layer("classifier.6", build_head, kind="head", init=init_vgg))
    return _model("vgg", layers, 3, image_size)


def vgg19(config: Vgg19Config, image_size: int) -> Model:
    """VGG-19 of a configuration: 19 layers, 143,667,240 parameters for 1000 classes."""
    return vgg(
        VGG19,
        hidden=HIDDEN,
        num_classes=config.num_classes,
        image_size=image_size,
        dropout=config.dropout,
    )


# -- wide ResNets -----------------------------------------------------------------------

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


def wide_resnet(
    groups: Sequence[int], *, width: int, factor: int, num_classes: int, image_size: int
) -> Model:
    """A wide ResNet: a stem, groups of bottlenecks, and the classes.

    `groups` are the numbers of blocks, `width` the channels of the stem; the bottlenecks are
    `factor` times as wide as a ResNet's.
    """
    layers = [Layer("stem", partial(Stem, width), kind="embedding", init=init_normalised)]
    inputs = width
    for group, blocks in enumerate(groups):
        inner = width * factor * 2**group
        outputs = width * EXPANSION * 2**group
        for number in range(blocks):
            first = number == 0
            stride = 2 if first and group else 1
            build = partial(Bottleneck, inputs, inner, outputs, stride, first=first)
            layers.append(Layer(f"layer{group + 1}.{number}", build, init=init_normalised))
            inputs = outputs
    layers.append(_head("fc", inputs, num_classes))
    return _model("wide_resnet", layers, 3, image_size)


def wide_resnet101_2(config: WideResnetConfig, image_size: int) -> Model:
    """WideResNet-101-2 of a configuration: 35 layers, 126,886,696 parameters for 1000 classes."""
    return wide_resnet(
        RESNET101, width=WIDTH, factor=2, num_classes=config.num_classes, image_size=image_size
    )


def torchvision_name(name: str) -> str:
    """The name of a parameter or buffer in torchvision: the same without the stem's prefix."""
    return name.removeprefix(STEM)
