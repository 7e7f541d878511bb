"""Data sets of torch: read as they are, augmented by seed, epoch and sample, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import axsparse as ax
from axsparse.data.torch_dataset import READING, _DrawnFrom
from axsparse.runtime.errors import DataError
from axsparse.runtime.seeds import keyed_generator, preserved_rng


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is i plus noise; `draw` gives the noise."""

    def __init__(self, draw: Callable[[], Tensor], length: int = 10) -> None:
        self.draw = draw
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return number + self.draw(), torch.tensor(number)


DRAWS = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(10**9, (3,)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 9),
    "uniform_": lambda: torch.empty(3).uniform_(-1, 1),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "poisson": lambda: torch.poisson(torch.full((9,), 1e6)),
    "binomial": lambda: torch.binomial(torch.full((9,), 1e6), torch.full((9,), 0.5)),
    "beta": lambda: torch.distributions.Beta(0.2, 0.2).sample((3,)),
    "gamma": lambda: torch.distributions.Gamma(2.0, 1.0).sample((3,)),
    "init": lambda: nn.init.trunc_normal_(torch.empty(3)),
}


def read(data: Any, samples: list[int], epochs: list[int]) -> Tensor:
    inputs, _ = data.read(np.array(samples), np.array(epochs))
    return inputs[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("draw", DRAWS)
def test_what_torch_draws_depends_on_seed_epoch_and_sample_alone(draw: str) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    data = ax.from_torch(Noisy(DRAWS[draw]))
    assert data.reads_epochs, "batches give it the epoch"

    there = read(data, [3, 4, 3], [0, 0, 1])
    torch.rand(5)
    back = read(data, [3, 4], [1, 0])

    assert torch.equal(there[2], back[0]) and torch.equal(there[1], back[1])
    assert not torch.equal(there[0], there[2]), "another epoch"
    assert not torch.equal(there[0], there[1] - 1), "another sample"
    assert not torch.equal(read(ax.from_torch(Noisy(DRAWS[draw]), seed=1), [3], [0])[0], there[0])
    torch.set_rng_state(state)
    ax.from_torch(Noisy(DRAWS[draw]))
    assert torch.equal(torch.get_rng_state(), state), "nobody else's numbers are drawn"


def test_a_tensor_like_another_is_drawn_as_torch_draws_it() -> None:
    """Most versions of torch have these functions without a generator."""
    like = torch.zeros(2, 3, dtype=torch.float64)
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.rand_like(like),
        lambda: torch.randn_like(input=like, dtype=torch.float32),
        lambda: torch.randint_like(like, 5),
        lambda: torch.randint_like(like, low=5, high=9, dtype=torch.int64),
        lambda: torch.randint_like(like, high=10**6),
        lambda: torch.rand_like(like, requires_grad=True),
    ]
    for draw in draws:
        with preserved_rng():
            torch.default_generator.set_state(keyed_generator("from_torch", 1, 2, 3).get_state())
            expected = draw()

        with _DrawnFrom(keyed_generator("from_torch", 1, 2, 3)):
            drawn = draw()

        assert torch.equal(drawn, expected) and drawn.dtype == expected.dtype
        assert drawn.requires_grad == expected.requires_grad


def drawn_after(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.rand(3)


def seeded_twice() -> Tensor:
    seed = int(torch.randint(2**31, ()))
    return torch.stack([drawn_after(seed), drawn_after(seed)])


def restored() -> Tensor:
    state = torch.get_rng_state()
    image = torch.rand(3)
    torch.set_rng_state(state)
    return torch.stack([image, torch.rand(3)])


def forked() -> Tensor:
    with torch.random.fork_rng():
        image = torch.rand(3)
    return torch.stack([image, torch.rand(3)])


@pytest.mark.parametrize("draw", [seeded_twice, restored, forked])
def test_seeds_that_a_sample_sets_are_its_own(
    draw: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Image and mask are cropped alike, and dropout draws on from where it was."""
    of_gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", of_gpus.append)
    data = ax.from_torch(Noisy(draw))
    state = torch.get_rng_state()

    pair = read(data, [3], [1])[0]

    assert torch.equal(*pair) and not torch.equal(pair, read(data, [3], [0])[0])
    assert torch.equal(torch.get_rng_state(), state) and not of_gpus


def test_samples_of_a_seed_are_the_same_in_each_epoch() -> None:
    """Also where a batch is made so; another thread seeds torch as ever."""
    with ThreadPoolExecutor(1) as other:

        def seeded() -> Tensor:
            other.submit(torch.manual_seed, 9).result()
            return drawn_after(3)

        def collated(samples: list[Any]) -> Any:
            return torch.stack([x for x, _ in samples]) + seeded(), torch.zeros(len(samples))

        with preserved_rng():
            data = ax.from_torch(Noisy(seeded), collated)
            there, back = read(data, [3, 4], [0, 0]), read(data, [4, 3], [1, 1])
            drawn, later = torch.rand(3), drawn_after(9)

    expected = 2 * torch.rand(3, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(there - torch.tensor([[3.0], [4.0]]), expected, atol=1e-6)
    assert torch.equal(there, back.flip(0)) and torch.equal(drawn, later)


def test_one_thread_at_a_time_reads_samples() -> None:
    """Two parts of a data set may have one file between them."""
    is_free: list[bool] = []

    def asked() -> Tensor:
        is_free.append(other.submit(READING.acquire, False).result())
        return torch.zeros(1)

    with ThreadPoolExecutor(1) as other:
        ax.from_torch(Noisy(asked), lambda some: (asked().expand(len(some)), torch.ones(len(some))))

    assert not any(is_free)


def test_targets_that_differ_in_number_need_to_be_counted() -> None:
    ragged = [(torch.ones(1), torch.arange(1 + number // 9)) for number in range(10)]

    def padded(samples: list[Any]) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs), nn.utils.rnn.pad_sequence([*targets], True, -1.0)

    whole = ax.from_torch(ragged, padded, count_targets=lambda y: int((y >= 0).sum()))
    assert whole.targets_per_sample is None
    assert whole.count_targets(whole.read(np.arange(10), np.zeros(10, int))[1]) == 11


def test_targets_that_cross_entropy_leaves_out_do_not_count() -> None:
    """Also where none of the samples has one that are looked at first; bytes have none."""
    wholes = [(torch.ones(1), torch.tensor([1, 2])) for _ in range(1000)]
    for place in (3, 333, 500):  # 333 is looked at
        pairs = [*wholes[:place], (torch.ones(1), torch.tensor([1, -100])), *wholes[place + 1 :]]

        found = ax.from_torch(pairs)

        assert found.targets_per_sample is None
        assert found.targets_of_first == (None if place == 333 else 2)
        assert found.count_targets(found.read(np.arange(1000))[1]) == 1999
    bytes_ = ax.from_torch([(torch.ones(1), torch.ones(3, dtype=torch.uint8))])
    assert bytes_.targets_per_sample == 3


def test_the_fingerprint_is_that_of_contents_and_augmentation() -> None:
    plain = Noisy(lambda: torch.ones(1))
    made = [
        ax.from_torch(plain),
        ax.from_torch(Noisy(lambda: torch.ones(1))),
        ax.from_torch(Noisy(lambda: torch.ones(1), 11)),
        ax.from_torch(Noisy(lambda: torch.zeros(1))),
        ax.from_torch(Noisy(DRAWS["rand"])),
        ax.from_torch(Noisy(DRAWS["rand"]), seed=1),
    ]

    assert len({data.fingerprint for data in made}) == len(made) - 1


@pytest.mark.parametrize("length", [20, 3000])
def test_a_data_set_of_which_a_tenth_has_changed_has_another_fingerprint(length: int) -> None:
    """And one whose samples cannot all be read has one too: a run may never come to them."""
    pairs = [(torch.ones(1), torch.tensor(number)) for number in range(length)]
    before = ax.from_torch(pairs).fingerprint
    changed = np.random.default_rng(3).choice(length, length // 10, replace=False)

    for number in {*changed.tolist()} - {0, length - 1}:
        pairs[number] = torch.zeros(1), torch.tensor(number)
    relabelled = ax.from_torch(pairs).fingerprint
    for number in {*changed.tolist()} - {0, length - 1}:
        pairs[number] = torch.zeros(2), torch.tensor(number)
    torn = ax.from_torch(pairs).fingerprint

    assert len({before, relabelled, torn}) == 3


def test_what_a_fraction_of_the_samples_draws_elsewhere_is_found() -> None:
    seen = set[int]()

    class Drawing(Noisy):
        def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
            is_new = number not in seen
            seen.add(number)
            return torch.tensor(float(is_new and number % 7 == 3)), torch.tensor(number)

    with pytest.raises(DataError, match="its samples differ when they are read again"):
        ax.from_torch(Drawing(lambda: torch.ones(1), 1000))
