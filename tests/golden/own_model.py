"""A user's own program, of the Python API alone: a network of several inputs' kinds, and its data.

Settings are its arguments; the first one names a configuration file.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import axsparse as ax


def network() -> nn.Sequential:
    """A convolution, batch norm, and linear layers."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Flatten(), *hidden, nn.Linear(24, 5)
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of a microbatch."""
    return F.cross_entropy(outputs.float(), targets, reduction="sum")


def datasets() -> ax.Datasets:
    """Points that a generator draws, of five classes."""
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(96, 1, 8, generator=generator)
    classes = points[:, 0, :5].argmax(1)
    return ax.Datasets(
        ax.ArrayDataset(points[:64], classes[:64]), ax.ArrayDataset(points[64:], classes[64:])
    )


def main() -> None:
    """Train it as the settings say."""
    torch.manual_seed(0)
    model = ax.from_sequential(network(), loss, metrics={"top1": ax.count_top1})
    ax.Trainer(model, datasets, ax.configure(sys.argv[1], sys.argv[2:])).train()


if __name__ == "__main__":
    main()
