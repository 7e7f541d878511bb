"""Functions between a column-parallel and a row-parallel module that need all features: the
comparison with plain torch ends the run on every rank, by the name of the layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from support.on_mpi import on_mpi
from support.runs import random_init, summed_loss, tiny_config, train_here
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


DIFFERS = r"(output 0|the gradient of [a-z0-9. ]+) differs from plain torch by .*gather_output"
HOST = "on the meta device, .*; make its tensors on the device of its inputs$"
REFUSED: dict[str, tuple[Function, str]] = {
    "softmax": (partial(torch.softmax, dim=-1), DIFFERS),
    "a range on the host": (lambda z: z * torch.linspace(0.5, 1.5, z.shape[-1]), HOST),
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
