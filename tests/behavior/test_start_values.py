"""Start values are finite real numbers, drawn from any global generator, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.runs import random_init, summed_loss, tiny_config, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.models.layer import InitFunction, Layer, Model
from axsparse.runtime.errors import ConfigError


def not_a_number(_: str, shape: tuple[int, ...], __: torch.Generator) -> Tensor:
    return torch.full(shape, torch.nan)


def whole(_: str, shape: tuple[int, ...], __: torch.Generator) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def model_of(init: InitFunction) -> Model:
    block = Layer("block", partial(nn.Linear, 16, 16), init=init)
    head = Layer("head", partial(nn.Linear, 16, 5), kind="head", init=random_init)
    return Model([block, head], summed_loss)


@pytest.mark.parametrize(
    ("init", "layout", "pruning", "said"),
    [
        (
            not_a_number,
            (1, 1),
            {"sparsity": 0.0},
            "parameter block.weight: its start value is not finite: it has NaN or infinities; mend "
            "the layer's init or build, or what it starts from",
        ),
        (
            whole,
            (1, 1),
            {},
            "parameter block.weight: its start value is int64, not real floating-point numbers; "
            "mend the layer's init or build, or what it starts from",
        ),
    ],
)
def test_values_that_cannot_be_trusted_are_refused(
    init: InitFunction, layout: tuple[int, int], pruning: dict[str, Any], said: str
) -> None:
    config = tiny_config(
        pruning=pruning, batch={"global_batch_size": 4, "microbatch_size": 2}, train={"steps": 1}
    )

    with pytest.raises(ConfigError) as refused:
        train_in_process(*layout, model_of(init), config, vector_data())

    assert str(refused.value) == said


def test_torchs_global_generators_may_be_drawn_from() -> None:
    config = tiny_config(
        pruning={"distribution": "global"},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 1},
    )

    ranks = train_in_process(
        2, 2, model_of(lambda _, shape, __: torch.randn(shape)), config, vector_data()
    )

    for trainer, _ in ranks:
        for layer in trainer.parts.layers:
            for tensor in layer.state.owned:
                if tensor.name == "block.weight":
                    kept_K = layer.state.master(tensor.name).abs()
                    assert kept_K.min() > 1.0, "the largest fifth of a normal distribution"
