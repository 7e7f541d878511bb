"""Start values are finite real numbers, drawn from any global generator, or refused."""

from __future__ import annotations

from functools import partial

import torch
from support.runs import random_init, summed_loss, tiny_config, train_in_process, vector_data
from torch import nn

from axsparse.models.layer import InitFunction, Layer, Model


def model_of(init: InitFunction) -> Model:
    block = Layer("block", partial(nn.Linear, 16, 16), init=init)
    head = Layer("head", partial(nn.Linear, 16, 5), kind="head", init=random_init)
    return Model([block, head], summed_loss)


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
