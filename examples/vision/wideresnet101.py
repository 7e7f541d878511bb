"""WideResNet-101-2 (Zagoruyko & Komodakis 2016), under torchvision's names but for `stem.`.

mpirun -n 4 python examples/vision/wideresnet101.py data/imagenet
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from photos import classifier, he_normal, train
from torch import Tensor, nn

import axsparse as ax

RESNET101 = (3, 4, 23, 3)
"""Blocks of each group. The first block of every group but the first halves the sides."""
EXPANSION = 4
"""Output channels of a block, as a multiple of its bottleneck's at factor 1."""


class Stem(nn.Module):
    """7×7 convolution and pooling: (B, 3, S, S) to (B, C, S/4, S/4)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, outputs, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut, which makes one layer: no residual connection
    crosses two stages. In the first block of a group the shortcut is a 1×1 convolution."""

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


class Head(nn.Linear):
    """Mean over the pixels, and a linear layer: (B, C, S, S) to (B, classes)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(dim=(2, 3)))


def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Start values of convolutions and norms, as torchvision's."""
    if len(shape) > 1:
        return he_normal(shape, generator)
    return torch.full(shape, 1.0 if name.endswith("weight") else 0.0)


def init_head(inputs: int, _: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Start values of the head, as torch initialises linear layers."""
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def wide_resnet(
    groups: Sequence[int], size: int, *, width: int, factor: int, classes: int
) -> ax.Model:
    """A wide ResNet: a stem of `width` channels, groups of so many bottlenecks that are `factor`
    times as wide as a ResNet's, and the classes."""
    layers = [ax.Layer("stem", partial(Stem, width), kind="embedding", init=init)]
    inputs = width
    for group, blocks in enumerate(groups):
        inner, outputs = width * factor * 2**group, width * EXPANSION * 2**group
        for number in range(blocks):
            stride = 2 if number == 0 and group else 1
            build = partial(Bottleneck, inputs, inner, outputs, stride, first=number == 0)
            layers.append(ax.Layer(f"layer{group + 1}.{number}", build, init=init))
            inputs = outputs
    head = partial(Head, inputs, classes)
    layers.append(ax.Layer("fc", head, kind="head", init=partial(init_head, inputs)))
    return classifier("wide_resnet", layers, size)


def wide_resnet101_2(size: int) -> ax.Model:
    """WideResNet-101-2: 35 layers, 126,886,696 parameters."""
    return wide_resnet(RESNET101, size, width=64, factor=2, classes=1000)


if __name__ == "__main__":
    train(wide_resnet101_2, Path(__file__).with_suffix(".yaml"))
