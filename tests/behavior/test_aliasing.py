"""Layers that write into what they are given, or return what is not theirs: as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import judge_everywhere
from support.exhaustive import by_default
from support.images import image_config
from support.runs import random_init, summed_loss, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model

WIDTH = 16
BATCH = {"batch": {"global_batch_size": 12, "microbatch_size": 4}, "train": {"steps": 2}}
Build = Callable[[], nn.Module]


class Doing(nn.Module):
    """A linear layer with a forward of its own: `forward(self, *inputs)`."""

    def __init__(self, forward: Callable[..., Any], outputs: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs)
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self._forward(self, *inputs)


class WithTable(Doing):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.table = nn.Embedding(64, WIDTH)


class WithBuffer(Doing):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.register_buffer("mean", torch.zeros(WIDTH))


def saving(m: Any, x: Tensor) -> Any:
    """An output that autograd needs, and that the next layer must not change."""
    return torch.tanh(m.linear(x))


def through_view(m: Any, x: Tensor) -> Any:
    x.view(-1)[1:].mul_(2.0)
    return m.linear(x)


def through_view_apart(m: Any, x: Tensor) -> Any:
    return m.linear(torch.cat([x.reshape(-1)[:1], x.reshape(-1)[1:] * 2]).view_as(x))


def counting(m: Any, x: Tensor) -> Any:
    """Starts a count beside the activations, after having used it."""
    count = (x.detach() > 0).sum(dim=1)
    return torch.tanh(m.linear(x)) + m.table(count), count


def adding(m: Any, x: Tensor, count: Tensor) -> Any:
    """Adds to the integers it was passed, which autograd of the layer before still needs."""
    count += 3
    return torch.tanh(m.linear(x)) + m.table(count), count


def returning_buffer(m: Any, x: Tensor) -> Any:
    """Passes on a buffer that the next forward changes."""
    out = torch.tanh(m.linear(x))
    if m.training:
        m.mean.lerp_(out.detach().mean(dim=0), 0.5)
    return out, m.mean


def model_of(*builds: Build, init: Any = random_init) -> Model:
    layers = [Layer(f"l{number}", build, init=init) for number, build in enumerate(builds)]
    return Model(layers, summed_loss)


def written(here: Callable[..., Any], apart: Callable[..., Any]) -> tuple[Model, Model]:
    """Two layers of a function that writes into its input, and of one that does not."""
    one, two = (
        model_of(*[partial(Doing, forward), partial(Doing, saving)] * 2, OUT)
        for forward in (here, apart)
    )
    return one, two


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1)[:, :, :].flatten(1)


LINEAR, OUT = partial(Doing, saving), partial(Doing, saving, 5)
DOUBLING = partial(Doing, lambda m, x: m.linear(x.mul_(2.0).add_(0.5)))
DOUBLING_APART = partial(Doing, lambda m, x: m.linear(x * 2.0 + 0.5))
ENDING = partial(Doing, lambda m, x, count: m.linear(x / (1 + count[:, None])), 5)
PASSING = model_of(nn.Identity, LINEAR, nn.Identity, nn.Identity, OUT)
VIEWING = model_of(View, LINEAR, View, View, OUT)
SKIPPING = model_of(
    LINEAR,
    partial(Doing, lambda m, x: (saving(m, x) + x * torch.sigmoid(x), x)),
    partial(Doing, lambda m, x, old: (saving(m, x) + old * torch.sigmoid(old), old)),
    partial(Doing, lambda m, x, old: m.linear(x + old * old), 5),
)
MODELS: dict[str, tuple[Model, Model | None]] = {
    "a layer writes into its input": written(
        lambda m, x: m.linear(x.mul_(2.0).add_(0.5)), lambda m, x: m.linear(x * 2.0 + 0.5)
    ),
    "a layer writes through a view of its input": written(through_view, through_view_apart),
    "an activation in place": written(
        lambda m, x: m.linear(x.relu_()), lambda m, x: m.linear(x.relu())
    ),
    "a layer returns its input": (PASSING, PASSING),
    "a layer returns a view of its input": (VIEWING, VIEWING),
    "the next layer writes into a view": (
        model_of(LINEAR, View, DOUBLING, nn.Identity, OUT),
        model_of(LINEAR, View, DOUBLING_APART, nn.Identity, OUT),
    ),
    "integers that are passed along are written into": (
        model_of(partial(WithTable, counting), *[partial(WithTable, adding)] * 2, ENDING),
        model_of(
            partial(WithTable, counting),
            *[partial(WithTable, lambda m, x, count: adding(m, x, count.clone()))] * 2,
            ENDING,
        ),
    ),
    "a skip connection crosses stages in a tuple": (SKIPPING, SKIPPING),
    # Uses the first twice and the second twice: four gradients, whose order shows.
    "one tensor in two places has two gradients": (
        model_of(
            partial(Doing, lambda m, x: (saving(m, x),) * 2),
            partial(Doing, lambda m, one, two: (saving(m, one) + two * torch.sin(one), two * 1.5)),
            partial(Doing, lambda m, one, two: m.linear(one + torch.cos(two) * two), 5),
        ),
        None,
    ),
    "a buffer that is passed on stays what it was": (
        model_of(
            partial(WithBuffer, returning_buffer),
            partial(Doing, lambda m, x, mean: (saving(m, x * mean), mean)),
            partial(Doing, lambda m, x, mean: m.linear(x + mean * mean), 5),
            init=None,
        ),
        None,
    ),
}
"""Layers that write into their inputs, and the same without writing into anything: plain torch
judges them. Where there is None, training in one stage judges."""


@pytest.mark.parametrize("name", by_default(list(MODELS)[::3], MODELS))
def test_layers_train_as_in_plain_torch(name: str) -> None:
    """In 1 to 4 stages, with and without recomputation."""
    model, plain = MODELS[name]

    judge_everywhere(model, vector_data(), BATCH, plain=plain)


class Lending(ArrayDataset):
    """Gives its own memory away instead of a copy."""

    def __init__(self, inputs: Tensor, classes: Tensor) -> None:
        super().__init__(inputs, classes)
        self.lent = inputs[:4], classes[:4]

    def read(self, indices: object) -> tuple[tuple[Tensor, ...], Tensor]:
        return (self.lent[0],), self.lent[1]


def test_samples_in_memory_are_not_written_to() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(12, WIDTH, generator=generator)
    data = Lending(inputs, torch.randint(5, (12,), generator=generator))
    before = inputs.clone()
    config = image_config(train={"steps": 2, "eval_every": 1, "eval_steps": 1, "eval_first": True})

    train_in_process(2, 1, model_of(DOUBLING, LINEAR, OUT), config, data, validation=data)

    assert torch.equal(inputs, before)
