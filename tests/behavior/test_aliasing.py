"""Layers that write into what they are given, or return what is not theirs: as in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.cases import judge_everywhere
from support.images import image_config
from support.runs import random_init, summed_loss, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import ConfigError

WIDTH = 16


class Linear(nn.Module):
    """Its output, which autograd needs, must not be changed by the next layer."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Doubling(nn.Module):
    """Writes into its input; twice is not the same as once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(2.0).add_(0.5))
        return out


class DoublingApart(Doubling):
    """The same, without writing into anything."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * 2.0 + 0.5)
        return out


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1)[:, :, :].flatten(1)


class ThroughView(Doubling):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1)[1:].mul_(2.0)
        out: Tensor = self.linear(x)
        return out


class ThroughViewApart(Doubling):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.cat([x.reshape(-1)[:1], x.reshape(-1)[1:] * 2]).view_as(x))
        return out


class InPlaceReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.relu(x))
        return out


class ReLUApart(InPlaceReLU):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()


def model_of(*builds: Callable[[], nn.Module]) -> Model:
    layers = [Layer(f"l{n}", build, init=random_init) for n, build in enumerate(builds)]
    return Model([*layers, Layer("out", lambda: Linear(5), init=random_init)], summed_loss)


BATCH = {"batch": {"global_batch_size": 12, "microbatch_size": 4}, "train": {"steps": 2}}


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

    train_in_process(2, 1, model_of(Doubling, Linear), config, data, validation=data)

    assert torch.equal(inputs, before)


class Counting(nn.Module):
    """Starts a count next to the activations, after having used it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = (x.detach() > 0).sum(dim=1)
        return torch.tanh(self.linear(x)) + self.table(count), count


class Adding(Counting):
    """Adds to the integers it was passed, which autograd of the layer before still needs."""

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        count += 3
        return torch.tanh(self.linear(x)) + self.table(count), count


class AddingApart(Counting):
    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        count = count + 3
        return torch.tanh(self.linear(x)) + self.table(count), count


class Ending(Linear):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.linear(x / (1 + count[:, None]))
        return out


class Skipping(Linear):
    """A skip connection that crosses stages: passed along in a tuple, used by every layer."""

    def forward(self, x: Tensor, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        skipped = x if skipped is None else skipped
        return torch.tanh(self.linear(x)) + skipped * torch.sigmoid(skipped), skipped


class Joining(Linear):
    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.linear(x + skipped * skipped)
        return out


class Twice(Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = torch.tanh(self.linear(x))
        return out, out


class Both(Linear):
    """Uses the first twice and the second twice: four gradients, whose order shows."""

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.tanh(self.linear(one)) + two * torch.sin(one), two * 1.5


class BothEnd(Linear):
    def forward(self, one: Tensor, two: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.linear(one + torch.cos(two) * two)
        return out


class ReturnsBuffer(Linear):
    """Passes on a buffer that the next forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = torch.tanh(self.linear(x))
        if self.training:
            self.mean.lerp_(out.detach().mean(dim=0), 0.5)
        return out, self.mean.expand_as(out)


class UsesBuffer(Linear):
    def forward(self, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.tanh(self.linear(x * mean)), mean


def named(**builds: Callable[[], nn.Module]) -> Model:
    """Without a linear layer at the end."""
    layers = [Layer(name, build, init=random_init) for name, build in builds.items()]
    return Model(layers, summed_loss)


PASSING = model_of(nn.Identity, Linear, nn.Identity, nn.Identity)
VIEWING = model_of(View, Linear, View, View)
SKIPPING = named(into=Linear, skip0=Skipping, skip1=Skipping, join=lambda: Joining(5))
MODELS: dict[str, tuple[Model, Model | None]] = {
    "a layer writes into its input": (
        model_of(Doubling, Linear, Doubling, Linear),
        model_of(DoublingApart, Linear, DoublingApart, Linear),
    ),
    "a layer writes through a view of its input": (
        model_of(ThroughView, Linear, ThroughView, Linear),
        model_of(ThroughViewApart, Linear, ThroughViewApart, Linear),
    ),
    "an activation in place": (
        model_of(InPlaceReLU, Linear, InPlaceReLU, Linear),
        model_of(ReLUApart, Linear, ReLUApart, Linear),
    ),
    "a layer returns its input": (PASSING, PASSING),
    "a layer returns a view of its input": (VIEWING, VIEWING),
    "the next layer writes into a view": (
        model_of(Linear, View, Doubling, nn.Identity),
        model_of(Linear, View, DoublingApart, nn.Identity),
    ),
    "integers that are passed along are written into": (
        named(count=Counting, one=Adding, two=Adding, end=lambda: Ending(5)),
        named(count=Counting, one=AddingApart, two=AddingApart, end=lambda: Ending(5)),
    ),
    "a skip connection crosses stages in a tuple": (SKIPPING, SKIPPING),
    "one tensor in two places has two gradients": (
        named(twice=Twice, both=Both, end=lambda: BothEnd(5)),
        None,
    ),
    "a buffer that is passed on stays what it was": (
        Model(
            [
                Layer("buffer", ReturnsBuffer),
                Layer("use", UsesBuffer),
                Layer("end", lambda: Joining(5)),
            ],
            summed_loss,
        ),
        None,
    ),
}
"""Layers that write into their inputs or outputs, and the same without writing into anything,
trained by plain torch as the reference. Where there is None, training in one stage is the
reference."""


@pytest.mark.parametrize("name", MODELS)
def test_layers_train_as_in_plain_torch(name: str) -> None:
    """In 1 to 4 stages, with and without recomputation."""
    model, plain = MODELS[name]

    judge_everywhere(model, vector_data(), BATCH, plain=plain)


class Keeping(Linear):
    """Keeps what it returned and writes into it later."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            with torch.no_grad():
                self.kept.mul_(0.5)
        self.kept = self.linear(x)
        return self.kept


def test_an_output_that_is_written_to_after_it_was_sent_is_refused() -> None:
    config = image_config(train={"steps": 2, "check_layers": False})

    with pytest.raises(
        ConfigError,
        match=r"^layer l0: an output was written to after it had been passed on; return a tensor "
        r"that the module does not keep, or a copy of it$",
    ):
        train_in_process(2, 1, model_of(Keeping, Linear), config, vector_data())
