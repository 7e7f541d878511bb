"""A backward that draws random numbers is refused: no key would seed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.runs import summed_loss, tiny_config, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import ConfigError


class Rounded(torch.autograd.Function):
    """Its gradient has noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient + 1e-3 * torch.rand_like(gradient)


class ByFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rounded: Callable[[Tensor], Tensor] = Rounded.apply
        return rounded(super().forward(x))


class ByHook(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        return y


class Dropped(nn.Linear):
    """Draws in the forward, and again where it is recomputed, which is seeded."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


def train(kind: type[nn.Linear], recompute: int) -> None:
    layers = [
        Layer("noisy", lambda: kind(16, 16)),
        Layer("out", lambda: nn.Linear(16, 5), kind="head"),
    ]
    config = tiny_config(
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 2},
        pipeline={"checkpoint_activations": recompute},
    )
    train_in_process(1, 1, Model(layers, summed_loss), config, vector_data())


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("kind", [ByFunction, ByHook])
def test_it_is_refused(kind: type[nn.Linear], recompute: int) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^layers noisy to out: a backward draws random numbers, which no key seeds; draw ",
    ):
        train(kind, recompute)


@pytest.mark.parametrize("recompute", [0, 1])
def test_a_forward_that_draws_is_not(recompute: int) -> None:
    train(Dropped, recompute)
