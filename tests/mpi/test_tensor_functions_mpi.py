"""Functions between a column-parallel and a row-parallel module: each has the losses of one rank,
or the comparison with plain torch ends the run by the name of the layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from support.on_mpi import by_first_rank, on_mpi
from support.runs import random_init, summed_loss, tiny_config, train_here, train_in_process
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

SIZE = MPI.COMM_WORLD.size
WIDTH, HIDDEN = 16, 32
PLAN = {"up": "colwise", "down": "rowwise"}
Function = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    def __init__(self, between: Function) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.between(F.gelu(self.up(self.norm(x)))))
        return out


def scaled(z: Tensor, factors: Tensor) -> Tensor:
    return z * factors.to(z)


def python_dropout(z: Tensor) -> Tensor:
    kept = [float(random.random() < 0.8) for _ in range(z.shape[-1])]  # noqa: S311 - noise
    return scaled(z, torch.tensor(kept))


DIFFERS = r"(output 0|the gradient of [a-z0-9. ]+) differs from plain torch by .*gather_output"
FAILS = r"sharded \(Layer.tp_plan\), it fails with RuntimeError: .*gather_output"
HOST = "on the meta device, .*; make its tensors on the device of its inputs$"
REFUSED: dict[str, tuple[Function, str]] = {
    "softmax": (partial(torch.softmax, dim=-1), DIFFERS),
    "a range on the host": (lambda z: z * torch.linspace(0.5, 1.5, z.shape[-1]), HOST),
    "layer norm": (lambda z: F.layer_norm(z, (HIDDEN,)), FAILS),
    "numbers of numpy": (
        lambda z: scaled(z, torch.from_numpy(np.random.rand(z.shape[-1]))),
        DIFFERS,
    ),
    "numbers of Python": (python_dropout, DIFFERS),
}
RIGHT: dict[str, Function] = {
    "one number of numpy": lambda z: z * float(np.random.rand()),
    "clamped": lambda z: z.clamp(max=0.1),
}


def model(between: Function) -> Model:
    layers = [
        Layer("in", partial(nn.Linear, 8, WIDTH), init=random_init),
        Layer("block", partial(Mlp, between), init=random_init, tp_plan=PLAN),
        Layer("flat", nn.Flatten),
        Layer("out", partial(nn.Linear, 4 * WIDTH, 5), init=random_init),
    ]
    return Model(layers, summed_loss)


def data() -> ArrayDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(24, 4, 8, generator=generator)
    return ArrayDataset(inputs, torch.randint(5, (24,), generator=generator))


CONFIG = tiny_config(batch={"microbatch_size": 3}, train={"steps": 2})


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_features_ends_every_rank_with_the_layers_name(name: str) -> None:
    between, told = REFUSED[name]

    with on_mpi() as transport, pytest.raises(ConfigError, match=f"^layer block: {told}"):
        train_here(transport, Grid(1, 1, SIZE), model(between), CONFIG, data())


@pytest.mark.parametrize("name", RIGHT)
def test_what_treats_features_alike_has_the_losses_of_one_rank(name: str) -> None:
    def losses_of_one() -> list[float]:
        [(_, trace)] = train_in_process(1, 1, model(RIGHT[name]), CONFIG, data())
        return trace.losses

    expected = by_first_rank(losses_of_one)

    with on_mpi() as transport:
        _, trace = train_here(transport, Grid(1, 1, SIZE), model(RIGHT[name]), CONFIG, data())

    assert trace.losses == pytest.approx(expected, rel=1e-6)
