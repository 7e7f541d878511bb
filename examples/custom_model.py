"""A model of one's own on stages and replicas: mpirun -n 4 python examples/custom_model.py"""

import torch
import torch.nn.functional as F
from torch import nn

import axsparse as ax


def main(job: ax.Job) -> None:
    """Learn to tell in which quarter of the circle a noisy point lies."""
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
    data = ax.Datasets(
        training=ax.ArrayDataset(points[:3840], quarters[:3840]),
        validation=ax.ArrayDataset(points[3840:], quarters[3840:]),
    )
    config = ax.configure(
        {
            "batch": {"global_batch_size": 64, "microbatch_size": 8},
            "optimizer": {"learning_rate": 3e-3},
            "train": {"steps": 60, "eval_every": 30},
        }
    )
    g_inter = 2 if job.transport.size % 2 == 0 else 1
    grid = ax.Grid(g_inter, job.transport.size // g_inter)
    ax.build(job, model, lambda: data, config, grid=grid).train()


if __name__ == "__main__":
    ax.run(main)
