"""What layers return and write into: as in plain torch, wherever the model is cut and whenever it
runs.

Kernels may add in another order where strides differ. Some layers here go further: their results
are other numbers for other strides or addresses, so that a difference cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import judge_everywhere
from support.exhaustive import by_default
from support.images import image_config
from support.resuming import ran
from support.runs import Doing, random_init, summed_loss, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model

WIDTH = 16
BATCH = {"batch": {"global_batch_size": 12, "microbatch_size": 4}, "train": {"steps": 2}}
Build = Callable[[], nn.Module]
Forward = Callable[..., Any]


def model_of(*builds: Build, init: Any = random_init) -> Model:
    layers = [Layer(f"l{number}", build, init=init) for number, build in enumerate(builds)]
    return Model(layers, summed_loss)


# -- layers that write into what they are given, or return what is not theirs -----------------


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


def with_table(forward: Forward) -> Build:
    return lambda: Doing(forward, table=nn.Embedding(64, WIDTH))


def returning_buffer(m: Any, x: Tensor) -> Any:
    """Passes on a buffer that the next forward changes."""
    out = torch.tanh(m.linear(x))
    if m.training:
        m.mean.lerp_(out.detach().mean(dim=0), 0.5)
    return out, m.mean


def written(here: Forward, apart: Forward) -> tuple[Model, Model]:
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
    "a layer returns its input": (PASSING, PASSING),
    "a layer returns a view of its input": (VIEWING, VIEWING),
    "the next layer writes into a view": (
        model_of(LINEAR, View, DOUBLING, nn.Identity, OUT),
        model_of(LINEAR, View, DOUBLING_APART, nn.Identity, OUT),
    ),
    "integers that are passed along are written into": (
        model_of(with_table(counting), *[with_table(adding)] * 2, ENDING),
        model_of(
            with_table(counting),
            *[with_table(lambda m, x, count: adding(m, x, count.clone()))] * 2,
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
            lambda: Doing(returning_buffer, mean=torch.zeros(WIDTH)),
            partial(Doing, lambda m, x, mean: (saving(m, x * mean), mean)),
            partial(Doing, lambda m, x, mean: m.linear(x + mean * mean), 5),
            init=None,
        ),
        None,
    ),
}
"""Layers that write into their inputs, and the same without writing into anything: plain torch
judges them. Where there is None, training in one stage judges."""


@pytest.mark.parametrize("name", by_default(list(MODELS)[::4], MODELS))
def test_layers_train_as_in_plain_torch(name: str) -> None:
    """In 1 to 4 stages, with and without recomputation."""
    model, plain = MODELS[name]

    judge_everywhere(model, vector_data(), BATCH, plain=plain)


class Lending(ArrayDataset):
    """Gives its own memory away instead of a copy."""

    def read(self, indices: object) -> tuple[tuple[Tensor, ...], Tensor]:
        return (self._inputs[0][:4],), self._targets[:4]


def test_samples_in_memory_are_not_written_to() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(12, WIDTH, generator=generator)
    data = Lending(inputs, torch.randint(5, (12,), generator=generator))
    before = inputs.clone()
    config = image_config(train={"steps": 2, "eval_every": 1, "eval_steps": 1, "eval_first": True})

    train_in_process(2, 1, model_of(DOUBLING, LINEAR, OUT), config, data, validation=data)

    assert torch.equal(inputs, before)


# -- the form in memory of outputs and buffers -----------------------------------------------


def form(tensor: Tensor) -> float:
    """A number near 1 that depends on strides, memory addresses and lazy negations."""
    words = (*tensor.stride(), tensor.data_ptr() % 64, int(tensor.is_neg()))
    return 1 + (hash(words) % 1009) / 2000


class _SeesGradient(torch.autograd.Function):
    """Multiplies a gradient by a number that depends on its form."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        [gradient] = gradients
        return gradient * form(gradient)


def reading(shaped: Callable[[Tensor], Tensor], m: Any, x: Tensor) -> Any:
    """Takes in and returns (B, 4, WIDTH); a function decides the form of the output."""
    if x.dim() > 2:
        x = (x * form(x)).mean(dim=tuple(range(1, x.dim() - 1)))
    out = shaped(torch.tanh(m.linear(x[:, :WIDTH])))
    return _SeesGradient.apply(out)  # type: ignore[no-untyped-call]


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda h: h.view(-1, 4, WIDTH),
    "transposed": lambda h: h.view(-1, WIDTH, 4).transpose(1, 2),
    "every second": lambda h: h.view(-1, 2, 2 * WIDTH)[..., ::2],
    "cut": lambda h: h.view(-1, 4, WIDTH)[:, 1:],
    "one element off": lambda h: torch.cat([h.new_zeros(1), h.flatten()])[1:].view(-1, 4, WIDTH),
    "expanded": lambda h: h[:, None, :WIDTH].expand(-1, 4, -1),
    "odd strides": lambda h: h[:, :WIDTH].unsqueeze(1).transpose(0, 1).transpose(0, 1),
    "channels last": lambda h: h.view(-1, 2, 2, WIDTH).to(memory_format=torch.channels_last),
    "negated": lambda h: torch._neg_view(h.view(-1, 4, WIDTH)),
}
# Its gradient is expanded, as a mean's always is.
POOLING = partial(Doing, lambda m, x: m.linear(x.mean(dim=tuple(range(1, x.dim() - 1)))), 5)


@pytest.mark.parametrize("form", by_default(list(FORMS)[::4], FORMS))
def test_no_form_of_an_output_changes_a_bit(form: str) -> None:
    reads = partial(Doing, partial(reading, FORMS[form]), 4 * WIDTH)

    judge_everywhere(model_of(reads, reads, reads, POOLING), vector_data(), BATCH)


def test_a_buffer_has_one_form_before_and_after_a_checkpoint(tmp_path: Path) -> None:
    def reads() -> nn.Module:
        scale = torch.linspace(0.5, 1, 2 * WIDTH)[1::2]
        return Doing(lambda m, x: m.linear(x * m.scale * form(m.scale)), scale=scale)

    layers: list[Build] = [reads, partial(nn.Linear, WIDTH, WIDTH), partial(nn.Linear, WIDTH, 5)]
    model = model_of(*layers, init=None)
    config = image_config(train={"steps": 4}, checkpoint={"every": 0})
    run = partial(ran, config=config, model=lambda _: model, data=vector_data())
    one = run((1, 1), run_dir=tmp_path / "one")

    run((1, 1), run_dir=tmp_path / "two", stop_after=2)
    two = run((3, 1), run_dir=tmp_path / "two", resume="auto")

    assert two.losses == {step: one.losses[step] for step in (3, 4)}


# -- what a layer hands on: `forward(linear, *inputs)` of two layers in a row ------------------

HANDED_ON: dict[str, tuple[Forward, Forward]] = {
    "halves of one tensor": (
        lambda f, x: torch.tanh(f(x)).chunk(2, dim=1),
        lambda f, a, b: (torch.tanh(f(torch.cat([b, a], 1))), a),
    ),
    "its weight, which the next writes to": (
        lambda f, x: (f(x), f.weight),
        lambda f, x, w: torch.tanh(f(x) @ w.mul_(0.5)),
    ),
    "integers and truths": (
        lambda f, x: (f(x), x > 0, (x * 10).to(torch.int16).t(), (x * 10).abs().to(torch.uint16)),
        lambda f, x, a, b, c: (torch.tanh(f(x)) * a, b + 1, c),
    ),
    "scalars": (
        lambda f, x: (f(x), x.mean(), x.mean().detach()),
        lambda f, x, a, b: (torch.tanh(f(x)) * a + b, a, b),
    ),
    "what nobody uses": (
        lambda f, x: [f(x), x * 2, x * 3],
        lambda f, x, a, b: (torch.tanh(f(x)), b.detach()),
    ),
    "a leaf of its own": (
        lambda f, x: (f(x), x.detach().clone().requires_grad_()),
        lambda f, x, y: (torch.tanh(f(x)) * y, y),
    ),
    "an imaginary part": (
        lambda f, x: torch.fft.fft(f(x)).conj().imag,
        lambda f, x: torch.view_as_real(torch.fft.fft(f(x))).select(-1, 0),
    ),
}


@pytest.mark.parametrize("handed", by_default(list(HANDED_ON)[::4], HANDED_ON))
@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_what_a_layer_hands_on_is_the_same_wherever_the_model_is_cut(handed: str) -> None:
    forwards = [*HANDED_ON[handed], lambda _, x, *others: (x.float(), *others)]
    middle = [
        partial(Doing, lambda m, *given, each=each: each(m.linear, *given)) for each in forwards
    ]
    gathering = partial(
        Doing, lambda m, x, *others: m.linear(x + 1e-2 * sum(o.float().sum() for o in others)), 5
    )
    model = model_of(partial(nn.Linear, WIDTH, WIDTH), *middle, gathering)

    judge_everywhere(model, vector_data(), BATCH)
