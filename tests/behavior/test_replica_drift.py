"""Weights belong to the optimizer: a forward that writes to them is refused or found out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.runs import Doing, random_init, summed_loss, tiny_config, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import TrainingError

WIDTH = 16


def hidden(m: Any, x: Tensor) -> Any:
    """Writes what depends on the samples, past autograd and every version counter."""
    if m.training:
        m.linear.bias.data.add_(x.detach().sum() * 1e-3)
    return m.linear(x)


def model(middle: Callable[..., Any] = lambda m, x: m.linear(x)) -> Model:
    linear = partial(nn.Linear, WIDTH)
    layers = [
        Layer("in", partial(linear, WIDTH), init=random_init),
        Layer("middle", partial(Doing, middle), init=random_init),
        Layer("out", partial(linear, 5), init=random_init),
    ]
    return Model(layers, summed_loss)


def config(**train: Any) -> Config:
    return tiny_config(
        batch={"global_batch_size": 12, "microbatch_size": 3},
        train={"steps": 4, "check_layers": False, **train},
    )


@pytest.mark.parametrize(("g_inter", "stage", "every", "step"), [(1, 0, 1, 1), (3, 1, 3, 3)])
def test_replicas_that_drift_apart_are_found_out(
    g_inter: int, stage: int, every: int, step: int
) -> None:
    told = (
        f"step {step}: weights: replica 1 has come to others than replica 0 on stage {stage}; "
        "look for code that writes to weights beside the optimizer (through .data in a forward, "
        "say), or for bad memory of a host; resume from a checkpoint before that"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(told)}$") as caught:
        train_in_process(
            g_inter, 2, model(hidden), config(compare_replicas_every=every), vector_data()
        )
    assert caught.value.on_all_ranks


@pytest.mark.parametrize("every", [0, 5])
def test_replicas_are_compared_when_it_is_asked_for(every: int) -> None:
    [*_, (_, trace)] = train_in_process(
        1, 2, model(hidden), config(compare_replicas_every=every), vector_data()
    )

    assert len(trace.losses) == 4


@pytest.mark.parametrize(("precision", "sharded"), [("fp32", True), ("bf16", False)])
def test_replicas_that_stay_together_are_let_be(precision: str, sharded: bool) -> None:
    settings = tiny_config(
        batch={"global_batch_size": 12, "microbatch_size": 2},
        train={"steps": 4, "compare_replicas_every": 1},
        samo={"zero_stage": int(sharded)},
        precision=precision,
    )

    ranks = train_in_process(2, 3, model(), settings, vector_data())

    assert all(len(trace.losses) == 4 for _, trace in ranks)
