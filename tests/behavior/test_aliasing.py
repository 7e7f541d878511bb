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
    """What autograd needs of the output, the next layer must not have changed."""

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


def assert_as_plain_torch(model: Model, plain: Model) -> None:
    """In 1 to 4 stages, with and without recomputation, what plain torch makes of `plain`."""
    judge_everywhere(model, vector_data(), BATCH, plain=plain)


@pytest.mark.parametrize(
    ("written", "apart"),
    [(Doubling, DoublingApart), (ThroughView, ThroughViewApart), (InPlaceReLU, ReLUApart)],
)
def test_a_layer_may_write_into_its_input_wherever_it_stands(
    written: type[nn.Module], apart: type[nn.Module]
) -> None:
    assert_as_plain_torch(
        model_of(written, Linear, written, Linear), model_of(apart, Linear, apart, Linear)
    )


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


@pytest.mark.parametrize("passing", [nn.Identity, View])
def test_a_layer_may_return_its_input_or_a_view_of_it(passing: type[nn.Module]) -> None:
    model = model_of(passing, Linear, passing, passing)

    assert_as_plain_torch(model, model)


def test_views_of_an_input_may_be_written_into_by_the_next_layer() -> None:
    assert_as_plain_torch(
        model_of(Linear, View, Doubling, nn.Identity),
        model_of(Linear, View, DoublingApart, nn.Identity),
    )


class Counting(nn.Module):
    """Starts a count beside the activations, after having used it."""

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


def counting_model(adding: type[nn.Module]) -> Model:
    builds: list[tuple[str, Callable[[], nn.Module]]] = [
        ("count", Counting),
        ("one", adding),
        ("two", adding),
        ("end", lambda: Ending(5)),
    ]
    return Model([Layer(n, build, init=random_init) for n, build in builds], summed_loss)


def test_a_layer_may_write_into_integers_that_are_passed_along() -> None:
    assert_as_plain_torch(counting_model(Adding), counting_model(AddingApart))


class Skipping(Linear):
    """A skip connection that crosses stages: passed along in a tuple, used by every layer."""

    def forward(self, x: Tensor, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        skipped = x if skipped is None else skipped
        return torch.tanh(self.linear(x)) + skipped * torch.sigmoid(skipped), skipped


class Joining(Linear):
    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.linear(x + skipped * skipped)
        return out


def test_a_skip_connection_may_cross_stages_in_a_tuple() -> None:
    layers = [
        Layer("in", Linear, init=random_init),
        *(Layer(f"skip{number}", Skipping, init=random_init) for number in range(2)),
        Layer("join", lambda: Joining(5), init=random_init),
    ]
    model = Model(layers, summed_loss)

    assert_as_plain_torch(model, model)


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


def test_one_tensor_in_two_places_has_two_gradients_in_every_layout() -> None:
    model = Model(
        [
            Layer("twice", Twice, init=random_init),
            Layer("both", Both, init=random_init),
            Layer("end", lambda: BothEnd(5), init=random_init),
        ],
        summed_loss,
    )

    judge_everywhere(model, vector_data(), BATCH)


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


def test_a_buffer_that_is_passed_on_stays_what_it_was() -> None:
    layers = [
        Layer("buffer", ReturnsBuffer),
        Layer("use", UsesBuffer),
        Layer("end", lambda: Joining(5)),
    ]

    judge_everywhere(Model(layers, summed_loss), vector_data(), BATCH)


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
    with pytest.raises(
        ConfigError,
        match=r"^layer l0: an output was written to after it had been passed on; return a tensor "
        r"that the module does not keep, or a copy of it$",
    ):
        train_in_process(2, 1, model_of(Keeping, Linear), image_config(), vector_data())


class SometimesWriting(Doubling):
    made = 0

    def forward(self, x: Tensor) -> Tensor:
        self.made += 1
        if self.made > 1:
            x.mul_(1.0)
        out: Tensor = self.linear(x)
        return out


def test_a_layer_that_begins_to_write_into_its_input_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^layer l1: its forward writes into its input and did not in its first call, so "
        r"that others see the change; do so in every call, or in none$",
    ):
        train_in_process(1, 1, model_of(Linear, SometimesWriting), image_config(), vector_data())
