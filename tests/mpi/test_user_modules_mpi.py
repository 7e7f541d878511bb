"""What a user has set in a list of modules stays set on every rank: as plain torch trains it."""

from __future__ import annotations

from collections.abc import Callable
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

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.norm.get_buffer("running_mean").fill_(0.25)
        self.norm.get_buffer("running_var").fill_(2.0)
        self.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.drop(torch.relu(self.norm(self.linear(x))))


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


def words(samples: int = 30) -> ArrayDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(9, (samples, 4), generator=generator)
    return ArrayDataset(inputs, torch.randint(5, (samples,), generator=generator))


SET: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], ArrayDataset]]] = {
    "a frozen backbone in evaluation": (lambda: followed(Backbone().eval()), vector_data),
    "rows of an embedding frozen by a hook": (rows_frozen, words),
    "gradients masked by a hook after their sum": (masked, vector_data),
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
