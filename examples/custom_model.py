"""A custom model on stages and replicas: mpirun -n 4 python examples/custom_model.py"""

import torch
import torch.nn.functional as F
from torch import nn

import axsparse as ax


def main() -> None:
    """Learn to distinguish in which quarter of the circle a noisy point lies."""
    layers = [
        ax.Layer("in", lambda: nn.Sequential(nn.Linear(2, 128), nn.ReLU()), kind="embedding"),
        *(
            ax.Layer(f"hidden{i}", lambda: nn.Sequential(nn.Linear(128, 128), nn.ReLU()))
            for i in range(4)
        ),
        ax.Layer("out", lambda: nn.Linear(128, 4), kind="head"),
    ]
    model = ax.Model(layers, lambda out, y: F.cross_entropy(out.float(), y, reduction="sum"))
    points = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
    quarters = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    trainer = ax.Trainer(
        model,
        data=(
            ax.ArrayDataset(points[:3840], quarters[:3840]),
            ax.ArrayDataset(points[3840:], quarters[3840:]),
        ),
        global_batch_size=64,
        microbatch_size=8,
        learning_rate=3e-3,
        steps=60,
        eval_every=30,
    )
    trainer.train()


if __name__ == "__main__":
    main()
