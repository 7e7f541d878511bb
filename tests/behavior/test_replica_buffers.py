"""Buffers that replicas change in their own way: said once, since a checkpoint has the first's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.runs import summed_loss, tiny_config, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model

WIDTH = 16


class Centering(nn.Module):
    """Subtracts a moving average of what it has seen, in training as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        out: Tensor = self.linear(x - self.mean)
        return out


def spectral() -> nn.Module:
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def train(build: Callable[[], nn.Module], g_inter: int, g_data: int) -> None:
    layers = [
        Layer("in", lambda: nn.Linear(WIDTH, WIDTH)),
        Layer("own", build),
        Layer("out", lambda: nn.Linear(WIDTH, 5)),
    ]
    config = tiny_config(batch={"global_batch_size": 12, "microbatch_size": 3}, train={"steps": 3})
    train_in_process(g_inter, g_data, Model(layers, summed_loss), config, vector_data())


@pytest.mark.parametrize(("g_inter", "where"), [(1, 0), (3, 1)])
def test_a_run_says_once_that_it_will_resume_with_the_first_replicas_buffers(
    g_inter: int, where: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train(Centering, g_inter, 2)

    assert capsys.readouterr().err == (
        f"axsparse: warning: rank {where} (stage {where}, replica 0): each replica has its own "
        "own.mean; checkpoints hold the first replica's, so that a run that resumes goes on "
        "otherwise if training depends on them\n"
    )


@pytest.mark.parametrize(
    ("build", "g_data"),
    [(Centering, 1), (spectral, 2), (normalized, 2)],
    ids=["centering-1", "spectral-2", "normalized-2"],
)
def test_buffers_that_are_equal_or_change_nothing_are_not_spoken_of(
    build: Callable[[], nn.Module], g_data: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train(build, 1, g_data)

    assert capsys.readouterr().err == ""
