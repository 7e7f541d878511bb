"""What a user has set in a list of modules stays set on every rank: as plain torch trains it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mpi4py import MPI
from support.on_mpi import by_first_rank, on_mpi
from support.runs import summed_loss, tiny_config, vector_data, with_layout
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.data.order import samples_of_step
from axsparse.models.sequential import from_sequential
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.training.trainer import build

SIZE = MPI.COMM_WORLD.size
LAYOUTS = sorted({(1, SIZE), (SIZE, 1)})
WIDTH, BATCH, STEPS = 16, 12, 4
CONFIG = tiny_config(
    batch={"global_batch_size": BATCH, "microbatch_size": 3},
    pruning={"sparsity": 0.0},
    optimizer={"learning_rate": 1e-2, "weight_decay": 0.0, "clip_norm": 0.0},
    schedule={"decay": "constant", "warmup_steps": 0},
    train={"steps": STEPS},
)


class Backbone(nn.Module):
    """Layers with statistics and dropout, as if published."""

    def __init__(self, *, overrides: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.overrides = nn.Dropout(0.5), overrides
        self.norm.get_buffer("running_mean").fill_(0.25)
        self.norm.get_buffer("running_var").fill_(2.0)
        self.requires_grad_(requires_grad=False)

    def train(self, mode: bool = True) -> Any:
        return super().train(mode and not self.overrides)

    def forward(self, x: Tensor) -> Any:
        return self.drop(torch.relu(self.norm(self.linear(x))))


class Scaled(nn.Module):
    """Multiplies by frequencies that are computed once."""

    freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("freq", 10000 ** (-torch.arange(WIDTH) / WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.T) * self.freq


class Coordinates(nn.Linear):
    """Takes coordinates, or their bits, and subtracts what would be lost in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        floats = x if x.is_floating_point() else x.view(torch.float32)
        assert x.is_floating_point() or x.is_meta or bool((floats == 1000.5).all())
        return super().forward((floats - 1000).to(self.weight.dtype))


class Chain(nn.Sequential):
    """With a forward of its own."""

    def forward(self, x: Tensor) -> Any:
        return self[1](torch.tanh(self[0](x)))


class Stateful(nn.Linear):
    """Returns a state next to its outputs, as layers of Hugging Face's do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Last(nn.LSTM):
    """The outputs alone."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


def followed(*first: nn.Module) -> nn.Sequential:
    """Modules for up to four stages."""
    last = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), *last)


def rows_frozen() -> nn.Sequential:
    """An embedding of which words 0 to 3 keep their vectors."""
    embedding = nn.Embedding(9, 4)
    kept = torch.arange(9)[:, None] > 3
    embedding.weight.register_hook(lambda gradient: gradient * kept)
    return followed(embedding, nn.Flatten())


def masked() -> nn.Sequential:
    modules = followed()

    def mask(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[::2] = 0

    for layer in (0, 2):
        modules.get_parameter(f"{layer}.weight").register_post_accumulate_grad_hook(mask)
    return modules


def scaled() -> nn.Sequential:
    modules = followed()
    for layer, factor in ((0, 0.1), (2, 10.0)):
        weight = modules.get_parameter(f"{layer}.weight")
        weight.register_hook(partial(torch.mul, torch.tensor(factor)))
    return modules


def words(samples: int = 30) -> ArrayDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(9, (samples, 4), generator=generator)
    return ArrayDataset(inputs, torch.randint(5, (samples,), generator=generator))


SET: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], ArrayDataset]]] = {
    "a frozen backbone in evaluation": (lambda: followed(Backbone().eval()), vector_data),
    "a train() of its own": (lambda: followed(Backbone(overrides=True).train()), vector_data),
    "rows of an embedding frozen by a hook": (rows_frozen, words),
    "gradients masked by a hook after their sum": (masked, vector_data),
    "gradients scaled by a hook": (scaled, vector_data),
}


def seeded(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(5)
    return make()


def by_torch(make: Callable[[], nn.Sequential], data: ArrayDataset) -> dict[str, Tensor]:
    """The weights and buffers of a loop as its author would write it, modes left as they are."""
    modules = seeded(make)
    trained = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    settings = CONFIG.optimizer
    optimizer = torch.optim.AdamW(
        trained, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=0
    )
    for step in range(STEPS):
        (inputs,), targets = data.read(samples_of_step(len(data), BATCH, step, CONFIG.seed))
        optimizer.zero_grad()
        (summed_loss(modules(inputs), targets) / BATCH).backward()
        optimizer.step()
    return modules.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SET)
def test_what_is_set_in_a_module_trains_as_in_plain_torch(
    name: str, layout: tuple[int, int]
) -> None:
    make, data = SET[name]
    expected = by_first_rank(lambda: by_torch(make, data()))

    with on_mpi() as transport:
        model = from_sequential(seeded(make), summed_loss)
        config = with_layout(CONFIG, Grid(*layout))
        trainer = build(Job(transport), model, lambda: Datasets(data()), config, quiet=True)
        trainer.train()
        found = trainer.state_dict()

    if found is None:
        assert MPI.COMM_WORLD.rank
        return
    assert found.keys() == expected.keys()
    start = seeded(make).state_dict()
    for key, value in expected.items():
        # Microbatches are added in another order; AdamW moves each weight by 1e-2 a step.
        torch.testing.assert_close(found[key], value, rtol=0, atol=2e-5)
    assert not found[key].equal(start[key]), "the last layer did not train"


def train(
    transport: Transport, make: Callable[[], nn.Sequential], data: ArrayDataset, **values: Any
) -> int:
    """The steps done by a pipeline of all ranks."""
    config = with_layout(CONFIG.with_values(values), Grid(SIZE, 1))
    model = from_sequential(seeded(make), summed_loss)
    trainer = build(Job(transport), model, lambda: Datasets(data), config, quiet=True)
    trainer.train()
    return trainer.steps_done


def said_by_all(make: Callable[[], nn.Sequential], data: ArrayDataset, **values: Any) -> str:
    """The line of each rank, which is the same."""
    with on_mpi() as transport, pytest.raises(ConfigError) as refused:
        train(transport, make, data, **values)
    said = MPI.COMM_WORLD.allgather(str(refused.value))
    assert len({*said}) == 1, said
    return str(refused.value)


def test_coordinates_that_half_precision_would_round_end_the_run_and_their_bits_train() -> None:
    def make() -> nn.Sequential:
        return followed(Coordinates(WIDTH, WIDTH))

    values, classes = torch.full((30, WIDTH), 1000.5), torch.arange(30) % 5

    said = said_by_all(make, ArrayDataset(values, classes), precision="bf16")

    assert said.startswith("layer 0: "), said
    bits = ArrayDataset(values.view(torch.int32), classes)
    with on_mpi() as transport:
        assert train(transport, make, bits, precision="bf16") == STEPS


def compiled(child: nn.Module) -> nn.Module:
    return torch.compile(child, backend="eager")  # type: ignore[return-value]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


REFUSED: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], nn.Sequential], str]] = {
    "a compiled child": (
        *(lambda: followed(compiled(linear())), lambda: followed(linear())),
        "model: Sequential is compiled, .*; give it as it was before torch.compile, and set pip",
    ),
    "buffers on the meta device": (
        *(lambda: followed(on_meta(Scaled)), lambda: followed(Scaled())),
        "model: Sequential is on the meta device, where nothing has values; make it with",
    ),
    "a forward of its own": (
        *(lambda: Chain(linear(), nn.Linear(WIDTH, 5)), followed),
        "sequential: Chain has a forward of its own, .*; give it to ax.from_module",
    ),
    "a lazy layer": (
        *(lambda: followed(nn.LazyLinear(WIDTH)), lambda: followed(linear())),
        "model: Sequential: parameter '0.weight' has no shape yet; give its module all sizes",
    ),
    "a state that is None": (
        *(lambda: followed(Stateful(WIDTH, WIDTH)), lambda: followed(linear())),
        "layer 0: its forward returned tuple whose entry 1 is None",
    ),
    "an nn.LSTM": (
        *(lambda: followed(nn.LSTM(WIDTH, WIDTH)), lambda: followed(Last(WIDTH, WIDTH))),
        "layer 0: its forward returned tuple whose entry 1 is tuple; return a tensor, or a tuple",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_says_the_same_of_modules_that_are_refused_and_trains_mended_ones(
    name: str,
) -> None:
    wrong, mended, line = REFUSED[name]
    said = said_by_all(wrong, vector_data())

    assert re.match(line, said), said
    with on_mpi() as transport:
        assert train(transport, mended, vector_data()) == STEPS
