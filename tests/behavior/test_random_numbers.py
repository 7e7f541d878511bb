"""Random numbers of every global source follow from seed, step and sample.

In layers, in the loss and its metrics, in evaluations and recomputations, in every layout, from the
first draw on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import judge_everywhere
from support.exhaustive import each_once
from support.images import assert_equal_tensors
from support.runs import Doing, random_init, summed_loss, tiny_config, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.stage import Key, Stage

WIDTH = 16
Draw = Callable[[Tensor], Tensor]
SOURCES: dict[str, Draw] = {
    "torch": torch.rand_like,
    "python": lambda x: torch.full_like(x, random.random()),  # noqa: S311 - noise
    "numpy": lambda x: torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype),
}
SETTINGS: dict[str, Any] = {
    "batch": {"global_batch_size": 12, "microbatch_size": 3},
    "train": {"steps": 3, "eval_every": 2, "eval_steps": 2},
}


def noisy(draw: Draw, *, is_noisy: bool = True) -> Doing:
    """A layer that adds noise, in training as in evaluation, once it is switched on."""

    def forward(m: Any, x: Tensor) -> Any:
        out = torch.tanh(m.dropout(m.linear(x)))
        return out + draw(out) if m.is_noisy else out

    return Doing(forward, dropout=nn.Dropout(0.0), is_noisy=is_noisy)


def noisy_model(draw: Draw, *, is_noisy: bool = True, in_loss: bool = False) -> Model:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return summed_loss(logits + draw(logits) if in_loss else logits, targets)

    def metric(logits: Tensor, targets: Tensor) -> Tensor:
        return (draw(logits).mean(dim=-1) > 0.5).sum()

    build = partial(noisy, draw, is_noisy=is_noisy and not in_loss)
    layers = [Layer(f"l{n}", build, init=random_init) for n in range(2)]
    out = Layer("out", lambda: nn.Linear(WIDTH, 5), kind="head", init=random_init)
    return Model([*layers, out], loss, metrics={"lucky": metric} if in_loss else {})


@pytest.mark.parametrize(("in_loss", "source"), each_once([False, True], list(SOURCES)))
def test_no_layout_changes_what_is_drawn(source: str, in_loss: bool) -> None:
    model, data = noisy_model(SOURCES[source], in_loss=in_loss), vector_data()

    judge_everywhere(model, data, SETTINGS)

    config = tiny_config(**SETTINGS)
    traces = [
        train_in_process(1, replicas, model, config, data, validation=data)[0][1]
        for replicas in (1, 2)
    ]
    assert traces[1].losses == pytest.approx(traces[0].losses, rel=1e-5)


@pytest.mark.parametrize("draw", SOURCES.values(), ids=SOURCES)
def test_what_is_drawn_follows_from_seed_step_and_sample_and_leaves_the_users_numbers(
    draw: Draw,
) -> None:
    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return (x * draw(x)).sum()

    def drawn(seed: int, step: int, sample: int, *, is_training: bool = True) -> float:
        layers = [LayerRunner("l", noisy(draw), is_recomputed=False)]
        stage = Stage(layers, loss=loss, metrics={}, input_dtype=None, seed=seed)
        inputs, key = (torch.ones(2, WIDTH),), Key(step, sample)
        torch.manual_seed(0)
        for parameter in layers[0].parameters:
            nn.init.constant_(parameter, 0.1)
        if not is_training:
            return float(stage.evaluate(inputs, key, torch.zeros(2))[0])
        return float(stage.forward(0, inputs, key, torch.zeros(2), 1.0)[0].detach())

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 8)]
    first, again = ([drawn(*key) for key in keys] for _ in range(2))
    evaluated = [drawn(*key, is_training=False) for key in keys]

    assert first == again
    assert len({*first, *evaluated}) == 8
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


@pytest.mark.parametrize("by", ["build", "init"])
@pytest.mark.parametrize("source", SOURCES)
def test_start_values_of_every_source_do_not_depend_on_the_layout(source: str, by: str) -> None:
    draw = SOURCES[source]

    class Drawn(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            if self.weight.device.type == "cpu":
                self.weight = nn.Parameter(draw(torch.empty(WIDTH, WIDTH)) - 0.5)

    def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return draw(torch.empty(shape)) - 0.5

    layers = [Layer(f"l{n}", Drawn, init=init if by == "init" else None) for n in range(3)]
    model = Model(layers, lambda out, targets: (out.float() ** 2).sum())
    config = tiny_config(**{**SETTINGS, "train": {"steps": 1}})

    weights: list[dict[str, Tensor]] = []
    for stages in (1, 3):
        random.seed(stages)  # as other processes are in other states
        np.random.seed(stages)
        ranks = train_in_process(stages, 1, model, config, vector_data())
        weights.append({name: w for _, trace in ranks for name, w in trace.weights.items()})

    assert_equal_tensors(*weights)
    assert not torch.equal(weights[0]["l0.weight"], weights[0]["l1.weight"])
