"""What a data set's members may give: which targets count, lengths, and no random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from support.runs import mlp, summed_loss, tiny_config, train_in_process
from torch import Tensor, nn

import axsparse as ax
from axsparse.data.dataset import ArrayDataset
from axsparse.models.sequential import from_sequential
from axsparse.runtime.errors import DataError

X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 5
CONFIG = tiny_config(
    batch={"global_batch_size": 24, "microbatch_size": 6},
    train={"steps": 1, "eval_every": 1, "eval_steps": "all"},
    pruning={"sparsity": 0.0},
)


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 1)])
def test_the_mean_loss_is_over_the_targets_that_the_loss_counts(layout: tuple[int, int]) -> None:
    """-100 is what cross entropy leaves out, in training and in evaluations."""
    targets = Y.clone()
    targets[::3] = -100
    torch.manual_seed(1)
    modules = nn.Sequential(nn.Linear(16, 5))
    with torch.no_grad():
        expected = F.cross_entropy(modules(X), targets).item()
    data = ArrayDataset(X, targets)

    _, trace = train_in_process(
        *layout, from_sequential([*modules, nn.Identity()], summed_loss), CONFIG, data
    )[-1]

    assert data.targets_per_sample is None
    assert trace.losses[0] == pytest.approx(expected, rel=1e-5)


def test_where_minus_100_is_a_number_like_any_other_it_counts() -> None:
    targets = torch.tensor([-100, 3, 4])

    whole = ArrayDataset(targets, targets, ignore_index=None)
    other = ArrayDataset(targets, targets, ignore_index=3)
    real = ArrayDataset(targets, targets.float())

    assert (whole.targets_per_sample, real.targets_per_sample) == (1, 1)
    assert [each.count_targets(targets) for each in (whole, other)] == [3, 2]
    assert real.count_targets(targets.float()) == 3


class Own:
    """A data set of a user's; `length` is what `__len__` returns, or raises."""

    name, fingerprint, vocab_size, targets_per_sample = "own", "1", None, 1

    def __init__(self, length: Any = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """As a data set of torch has it."""
        return X[number], Y[number]

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        return (X[indices % 24],), Y[indices % 24]

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()


@pytest.mark.parametrize(
    ("length", "why"),
    [
        (24.0, "TypeError: 'float' object cannot be interpreted as an integer"),
        (-24, "ValueError: __len__() should return >= 0"),
        (10**30, "OverflowError: cannot fit 'int' into an index-sized integer"),
        (None, "TypeError: 'NoneType' object cannot be interpreted as an integer"),
        (KeyError("no file"), "KeyError: 'no file'"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda wrong: train_in_process(1, 1, mlp(), CONFIG, wrong),
        lambda wrong: train_in_process(2, 1, mlp(), CONFIG, Own(), validation=wrong),
        lambda wrong: ax.from_torch(wrong, name="own"),
    ],
    ids=["training", "validation", "from_torch"],
)
def test_a_length_that_is_none_is_refused(
    length: Any, why: str, use: Callable[[Own], object]
) -> None:
    with pytest.raises(DataError) as refused:
        use(Own(length))

    assert str(refused.value) == (
        f"data (own): its __len__ gives no length ({why}); return the number of samples, an int of "
        "at least 1"
    )
