"""Odd tensors through full training steps, in every encoding, against the dense masked oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from support.exhaustive import each_once
from support.oracle import Oracle
from support.runs import (
    assert_bitwise,
    random_init,
    summed_loss,
    tiny_config,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model
from axsparse.samo.state_bytes import IndexKind

KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
STEPS = 4


class Shaped(nn.Module):
    """A convolution of points that are seen as a grid; (B, n) to (B, m)."""

    def __init__(self, convolution: type[nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.convolution = convolution(shape[0], 3, 2, padding=1)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convolution(x.view(-1, *self.shape))
        return torch.tanh(out).flatten(1)


class Transposed(nn.Linear):
    """A linear map whose weight lies in memory column by column."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).t())
        assert not self.weight.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.contiguous())


def odd_model() -> Model:
    """Weights of five, four, three and two dimensions, and of memory in another order."""
    builds: dict[str, Callable[[], nn.Module]] = {
        "space": partial(Shaped, nn.Conv3d, (1, 2, 2, 4)),  # 3 × 3 × 3 × 5
        "plane": partial(Shaped, nn.Conv2d, (5, 3, 9)),  # 3 × 4 × 10
        "line": partial(Shaped, nn.Conv1d, (4, 30)),  # 3 × 31
        "columns": partial(Transposed, 93, 7),
    }
    layers = [Layer(name, build, init=random_init) for name, build in builds.items()]
    head = Layer("head", partial(nn.Linear, 7, 5), kind="head", init=random_init)
    return Model([*layers, head], loss=summed_loss, name="odd")


PRUNINGS = {
    "some kept": {"sparsity": 0.7},
    "none kept": {"sparsity": 0.9999},
    "all kept": {"sparsity": 0.0001},
    "pruned in training": {"sparsity": 0.7, "at_step": 2},
}


@pytest.mark.parametrize(("name", "kind"), each_once(list(PRUNINGS), KINDS))
def test_tensors_of_any_shape_and_density_train_bitwise_as_the_oracle(name: str, kind: str) -> None:
    pruning = PRUNINGS[name]
    config = tiny_config(samo={"index": kind}, pruning=pruning, train={"steps": STEPS})
    oracle = Oracle(odd_model(), config, vector_data(), 2).run(STEPS)

    ranks = train_in_process(2, 2, odd_model(), config, vector_data())

    tensors = [
        tensor
        for trainer, _ in ranks[:2]
        for layer in trainer.layers
        if layer.spec.kind == "block"
        for tensor in layer.state.owned
        if tensor.parameter.dim() >= 2
    ]
    assert sorted(tensor.parameter.dim() for tensor in tensors) == [2, 3, 4, 5]
    for tensor in tensors:
        numel = tensor.parameter.numel()
        assert tensor.kept == numel - round(pruning["sparsity"] * numel)
        assert tensor.kept in (0, numel) or pruning["sparsity"] == 0.7
    for _, trace in ranks:
        assert_bitwise(trace, oracle)
