"""Values that a data set may give: which targets count, lengths, and no random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.runs import summed_loss, tiny_config, train_in_process
from torch import nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.sequential import from_sequential

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
