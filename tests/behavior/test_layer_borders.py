"""The outputs of a layer have one form in memory, wherever the model is cut and whenever it runs.

Kernels may add in another order where strides differ. The layers here go further: their results
are other numbers for other strides or addresses, so that a difference cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import judge_everywhere
from support.exhaustive import by_default
from support.images import image_config
from support.resuming import ran
from support.runs import random_init, summed_loss, vector_data
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model

WIDTH = 16


def form(tensor: Tensor) -> float:
    """A number near 1 that depends on strides, memory addresses and lazy negations."""
    words = (*tensor.stride(), tensor.data_ptr() % 64, int(tensor.is_neg()))
    return 1 + (hash(words) % 1009) / 2000


class _SeesGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        [gradient] = gradients
        return gradient * form(gradient)


def seen_backward(x: Tensor) -> Tensor:
    """The same tensor, whose gradient is multiplied by a number that depends on its form."""
    out: Tensor = _SeesGradient.apply(x)  # type: ignore[no-untyped-call]
    return out


class Reading(nn.Module):
    """Takes in and returns (B, 4, WIDTH), by a function that decides the form of the output."""

    def __init__(self, shaped: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4 * WIDTH)
        self._shaped = shaped

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 2:
            x = (x * form(x)).mean(dim=tuple(range(1, x.dim() - 1)))
        out = self._shaped(torch.tanh(self.linear(x[:, :WIDTH])))
        return seen_backward(out)


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


class Pooling(nn.Module):
    """Its gradient is expanded, as a mean's always is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mean(dim=tuple(range(1, x.dim() - 1))))
        return out


def reading_model(shaped: Callable[[Tensor], Tensor]) -> Model:
    layers = [Layer(f"l{n}", lambda: Reading(shaped), init=random_init) for n in range(3)]
    return Model([*layers, Layer("out", Pooling, init=random_init)], summed_loss)


BATCH = {"batch": {"global_batch_size": 12, "microbatch_size": 4}, "train": {"steps": 2}}


@pytest.mark.parametrize("form", by_default(list(FORMS)[::3], FORMS))
def test_no_form_of_an_output_changes_a_bit(form: str) -> None:
    judge_everywhere(reading_model(FORMS[form]), vector_data(), BATCH)


class ReadsBuffer(nn.Module):
    """Its result depends on the form of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1, 2 * WIDTH)[1::2])
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.scale * form(self.scale))
        return out


def test_a_buffer_has_one_form_before_and_after_a_checkpoint(tmp_path: Path) -> None:
    layers = [
        Layer("reads", ReadsBuffer),
        Layer("middle", lambda: nn.Linear(WIDTH, WIDTH)),
        Layer("out", lambda: nn.Linear(WIDTH, 5)),
    ]
    model, data = Model(layers, summed_loss), vector_data()
    config = image_config(train={"steps": 4}, checkpoint={"every": 0})
    one = ran((1, 1), config, tmp_path / "one", model=lambda _: model, data=data)

    run_dir = tmp_path / "two"
    ran((1, 1), config, run_dir, model=lambda _: model, data=data, stop_after=2)
    two = ran((3, 1), config, run_dir, model=lambda _: model, data=data, resume="auto")

    assert {**one.losses, **two.losses} == one.losses
    assert set(two.losses) == {3, 4}


class Expanding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out[:, None, :WIDTH].expand(-1, 4, -1)


def test_what_takes_in_a_view_can_be_recomputed() -> None:
    builds: list[Callable[[], nn.Module]] = [Expanding, lambda: nn.Linear(WIDTH, WIDTH), Pooling]
    layers = [Layer(f"l{n}", build, init=random_init) for n, build in enumerate(builds)]

    judge_everywhere(Model(layers, summed_loss), vector_data(), BATCH)


class Handing(nn.Module):
    """A linear layer with a custom forward: `forward(linear, *inputs)`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self._forward(self.linear, *inputs)


class Gathering(nn.Module):
    """Uses all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        out: Tensor = self.linear(x + 1e-2 * sum(other.float().sum() for other in others))
        return out


Forward = Callable[..., Any]
HANDED_ON: dict[str, tuple[Forward, Forward]] = {
    "its input twice": (lambda f, x: (x, x), lambda f, x, y: (torch.tanh(f(x)) + y, y)),
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


@pytest.mark.parametrize("handed", by_default(list(HANDED_ON)[::2], HANDED_ON))
@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_what_a_layer_hands_on_is_the_same_wherever_the_model_is_cut(
    handed: str,
) -> None:
    first, second = HANDED_ON[handed]

    def last(_: nn.Linear, x: Tensor, *others: Tensor) -> Any:
        return (x.float(), *others)

    layers = [
        Layer("in", lambda: nn.Linear(WIDTH, WIDTH), init=random_init),
        Layer("first", lambda: Handing(first), init=random_init),
        Layer("second", lambda: Handing(second), init=random_init),
        Layer("third", lambda: Handing(last), init=random_init),
        Layer("out", Gathering, init=random_init),
    ]

    judge_everywhere(Model(layers, summed_loss), vector_data(), BATCH)
