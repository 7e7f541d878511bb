"""Criteria keep exact counts, break ties by position, and depend on names, never on order."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from support.runs import default_dtype
from torch import Tensor

from axsparse.pruning.criteria import Criterion


def no_weights() -> Tensor:
    raise AssertionError("the random method asked for weights")


@pytest.mark.parametrize("within", [None, torch.arange(0, 24, 2)])
def test_each_matrix_of_a_stack_keeps_its_share(within: Tensor | None) -> None:
    weights = torch.arange(24.0).view(3, 4, 2)  # The last expert has the largest.

    mask = Criterion("magnitude", input_dims={"w": 2}).mask(
        "w", (3, 4, 2), lambda: weights, 8, within
    )

    assert mask.view(3, -1).sum(1).tolist() == [3, 3, 2]
    step = 1 if within is None else 2
    expected = torch.zeros(3, 8, dtype=torch.bool)
    for expert, share in enumerate((3, 3, 2)):
        last = 7 if step == 1 else 6
        expected[expert, [last - step * n for n in range(share)]] = True
    assert torch.equal(mask.view(3, 8), expected)


def test_a_pattern_of_a_stack_runs_along_the_inputs_of_each_matrix() -> None:
    weights = torch.tensor([[[1.0, 4, 3, 2], [8, 5, 6, 7]]])

    of_rows, of_columns = [[0, 1, 1, 0], [1, 0, 0, 1]], [[0, 0, 0, 0], [1, 1, 1, 1]]
    for inputs, pattern, kept in ((2, (2, 4), of_rows), (1, (1, 2), of_columns)):
        criterion = Criterion("magnitude", pattern=pattern, input_dims={"w": inputs})
        mask = criterion.mask("w", (1, 2, 4), lambda: weights, 0)
        assert mask.view(2, 4).int().tolist() == kept


# -- scores ---------------------------------------------------------------------------------


def test_random_masks_depend_on_seed_and_name_and_never_on_order_or_weights() -> None:
    def draw(seed: int, name: str) -> list[bool]:
        kept: list[bool] = Criterion("random", seed).mask(name, (8, 8), no_weights, 32).tolist()
        return kept

    first = {name: draw(1, name) for name in ("a", "b", "c")}
    torch.manual_seed(7)
    again = {name: draw(1, name) for name in ("c", "a", "b")}

    assert again == first
    assert len({tuple(mask) for mask in first.values()}) == 3
    assert draw(2, "a") != first["a"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_random_masks_do_not_depend_on_torchs_default_type(dtype: torch.dtype) -> None:
    criterion = Criterion("random")
    expected = criterion.mask("w", (64, 64), no_weights, 2048)

    with default_dtype(dtype):
        mask = criterion.mask("w", (64, 64), no_weights, 2048)

    assert torch.equal(mask, expected)


def test_a_score_of_ones_own_sees_name_and_weights_and_keeps_the_highest() -> None:
    weight = torch.tensor([[3.0, -1.0, 2.0], [0.5, 4.0, -5.0]])
    seen: list[str] = []

    def rows_first(name: str, weight: Tensor) -> Tensor:
        seen.append(name)
        return 10 * weight.abs().sum(1, keepdim=True) + weight

    mask = Criterion(rows_first).mask("a.weight", (2, 3), lambda: weight, 3)

    assert seen == ["a.weight"]
    assert mask.view(2, 3).tolist() == [[False, False, False], [True, True, True]]


# -- parts of a tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("score", ["magnitude", "random"])
def test_of_a_pruned_tensor_only_kept_entries_stay_and_the_best_of_them(
    score: Literal["magnitude", "random"],
) -> None:
    weights = torch.randn(100, generator=torch.Generator().manual_seed(0))
    within = torch.arange(0, 100, 3)
    scores, _ = Criterion(score).scores("w", (100,), lambda: weights)
    best = scores.abs()[within].argsort(descending=True)[:7]

    mask = Criterion(score).mask("w", (100,), lambda: weights, 7, within)

    assert set(mask.nonzero().view(-1).tolist()) == set(within[best].tolist())
