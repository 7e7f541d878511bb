"""An afternoon's work: a custom vision model, pruned on two stages and two replicas, its curves,
and its weights back in plain torch.

    mpirun -n 4 python examples/afternoon.py layout.g_inter=2              # a minute on two cores
    mpirun -n 4 python examples/afternoon.py layout.g_inter=2 pruning.sparsity=0.95 run_dir=runs/2
"""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from digits import digits_datasets
from torch import Tensor, nn

import axsparse as ax

SETTINGS = Path(__file__).with_name("afternoon.yaml")


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


def network() -> nn.Sequential:
    """Images (b, 1, 8, 8) to logits (b, 10). Every module is a layer, and stages are cut between
    them."""
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(1, 32, 3, padding=1),
            first=Residual(32),
            second=Residual(32),
            pool=nn.MaxPool2d(2),
            third=Residual(32),
            flat=nn.Flatten(),
            head=nn.Linear(32 * 4 * 4, 10),
        )
    )


def summed_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The summed cross-entropy of a microbatch."""
    return F.cross_entropy(logits.float(), classes, reduction="sum")


def accuracy(module: nn.Module, data: ax.ArrayDataset) -> float:
    """The accuracy of any module of torch, which knows nothing of axsparse."""
    (images,), classes = data.read(np.arange(len(data)))
    with torch.no_grad():
        right = int((module.eval()(images).argmax(1) == classes).sum())
    return right / len(data)


def main() -> None:
    """Train, and compare the trained model with the reported accuracy."""
    training, validation = digits_datasets()
    model = ax.from_sequential(
        network(),
        summed_loss,
        metrics={"top1": ax.count_top1},
        example=lambda n: training.read(np.arange(n))[0],
    )
    config = ax.configure(SETTINGS, sys.argv[1:])
    trainer = ax.Trainer(model, (training, validation), config)

    reported: dict[int, float] = {}
    trainer.train(on_evaluation=lambda step, found: reported.update({step: found.metrics["top1"]}))
    plain = trainer.model()  # on all ranks together; rank 0 gets it

    if plain is None or trainer.run_dir is None:
        return
    last, best = trainer.steps_done, network()
    best.load_state_dict(ax.load(trainer.run_dir, step="best"))
    kept = [p for p in plain.parameters() if p.dim() == 4]
    zeros = sum(int((p == 0).sum()) for p in kept) / sum(p.numel() for p in kept)
    print(
        f"accuracy reported {reported[last]:.4f}, in plain torch {accuracy(plain, validation):.4f}"
    )
    print(f"accuracy of the best checkpoint {accuracy(best, validation):.4f}")
    print(f"{100 * zeros:.0f} % of the convolutions are zero")
    assert accuracy(plain, validation) == reported[last]
    assert accuracy(best, validation) in reported.values()
    report = [sys.executable, "-m", "axsparse", "report", str(trainer.run_dir)]
    subprocess.run(report, check=True)  # noqa: S603 - the curves, as one page for a browser


if __name__ == "__main__":
    main()
