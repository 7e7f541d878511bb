"""Which entries are kept: exact counts, ties by position, and names instead of order."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axsparse.models.layer import Kind
from axsparse.pruning.criteria import Criterion, kept_entries, largest

examples = settings(max_examples=150, deadline=None, derandomize=True)
few_values = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, float("inf")]), min_size=1, max_size=60)
any_values = st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=60)


def criterion(
    method: Literal["magnitude", "random"] = "magnitude",
    sparsity: float = 0.9,
    include: Literal["blocks", "all"] = "blocks",
    seed: int = 1,
) -> Criterion:
    return Criterion(method, sparsity, include, seed)


def no_weights() -> Tensor:
    raise AssertionError("the random method asked for weights")


# -- selection ------------------------------------------------------------------------------


@examples
@given(st.one_of(few_values, any_values), st.data())
def test_the_largest_are_those_of_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda at: (-values[at], at))

    mask = largest(torch.tensor(values, dtype=torch.float32), keep)

    assert mask.dtype == torch.bool
    assert mask.nonzero().view(-1).tolist() == sorted(order[:keep])


def test_among_equal_scores_lower_positions_stay() -> None:
    assert largest(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 3).tolist() == [1, 1, 0, 1, 0]


def test_selecting_leaves_the_scores_alone() -> None:
    score = torch.tensor([3.0, 1.0, 2.0])

    largest(score, 1)

    assert score.tolist() == [3.0, 1.0, 2.0]


# -- counts ---------------------------------------------------------------------------------


@examples
@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_tensor_loses_its_share_rounded_to_whole_entries(numel: int, sparsity: float) -> None:
    kept = kept_entries(numel, sparsity)

    assert kept == numel - round(sparsity * numel)
    assert 0 <= kept <= numel


@pytest.mark.parametrize("method", ["magnitude", "random"])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("numel", [1, 7, 100, 4099])
def test_every_mask_keeps_exactly_its_count(
    method: Literal["magnitude", "random"], sparsity: float, numel: int
) -> None:
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(0))

    mask = criterion(method, sparsity).mask("w", lambda: weights, numel)

    assert int(mask.sum()) == criterion(method, sparsity).kept(numel)
    assert int(mask.sum()) == numel - round(sparsity * numel)


# -- scores ---------------------------------------------------------------------------------


def test_magnitude_keeps_large_weights_of_either_sign() -> None:
    weights = torch.tensor([0.1, -3.0, 0.2, 2.0, -0.3])

    mask = criterion(sparsity=0.6).mask("w", lambda: weights, 5)

    assert mask.tolist() == [False, True, False, True, False]


def test_magnitude_depends_on_the_weights_only() -> None:
    weights = torch.randn(100, generator=torch.Generator().manual_seed(0))

    one = criterion(seed=1).mask("a", lambda: weights, 100)
    other = criterion(seed=2).mask("b", lambda: weights, 100)

    assert torch.equal(one, other)


def test_random_masks_depend_on_seed_and_name_and_never_on_order_or_weights() -> None:
    def draw(seed: int, name: str) -> list[bool]:
        kept: list[bool] = criterion("random", 0.5, seed=seed).mask(name, no_weights, 64).tolist()
        return kept

    first = {name: draw(1, name) for name in ("a", "b", "c")}
    torch.manual_seed(7)
    again = {name: draw(1, name) for name in ("c", "a", "b")}

    assert again == first
    assert len({tuple(mask) for mask in first.values()}) == 3
    assert draw(2, "a") != first["a"]


# -- which tensors --------------------------------------------------------------------------


@pytest.mark.parametrize("include", ["blocks", "all"])
@pytest.mark.parametrize("kind", ["block", "embedding", "head"])
def test_matrices_of_blocks_are_pruned_and_those_of_the_ends_only_if_asked_for(
    include: Literal["blocks", "all"], kind: Kind
) -> None:
    prunes = criterion(include=include).prunes(kind, (4, 4))

    assert prunes == (kind == "block" or include == "all")


@pytest.mark.parametrize("shape", [(), (5,)])
def test_vectors_are_never_pruned(shape: tuple[int, ...]) -> None:
    assert not criterion(include="all").prunes("block", shape)


def test_convolutions_are_pruned_and_nothing_is_at_sparsity_zero() -> None:
    assert criterion().prunes("block", (8, 4, 3, 3))
    assert not criterion(sparsity=0.0).prunes("block", (8, 4, 3, 3))
