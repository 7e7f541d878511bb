"""A sparsity is spread over tensors with exact counts, and N of every M neighbours stay."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axsparse.pruning import distribution as module
from axsparse.pruning.distribution import erdos_renyi_kernel, kept_counts, n_of_m

Shapes = dict[str, tuple[int, ...]]

examples = settings(max_examples=150, deadline=None, derandomize=True)
shapes_of_models = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple),
    min_size=1,
    max_size=8,
)
sparsities = st.floats(0, 1, exclude_max=True)
ERK: Literal["erk"] = "erk"


def numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# -- Erdős–Rényi kernel ---------------------------------------------------------------------


@examples
@given(shapes_of_models, sparsities)
def test_erk_keeps_the_total_and_densities_within_one_entry_of_one_common_factor(
    shapes: Shapes, sparsity: float
) -> None:
    """Unlike the code, this finds the factor by bisection."""
    total = numel(shapes) - round(sparsity * numel(shapes))

    def ideal(factor: Fraction) -> dict[str, Fraction]:
        return {
            name: min(Fraction(math.prod(shape)), factor * sum(shape))
            for name, shape in shapes.items()
        }

    low, high = Fraction(0), Fraction(numel(shapes))
    for _ in range(60):
        middle = (low + high) / 2
        if sum(ideal(middle).values()) < total:
            low = middle
        else:
            high = middle
    kept = kept_counts(shapes, sparsity, distribution=ERK)

    assert all(abs(kept[name] - wanted) < 1.001 for name, wanted in ideal(high).items())
    assert sum(kept.values()) == total
    assert list(kept) == list(shapes)
    assert all(0 <= kept[name] <= math.prod(shape) for name, shape in shapes.items())


TWO: Shapes = {"a": (10, 10), "b": (40, 40)}


@pytest.mark.parametrize(
    ("shapes", "total", "kept"),
    [
        # In the ratio of the sums of dimensions, 20 to 80.
        (TWO, 170, {"a": 34, "b": 136}),
        # The nearest whole numbers to 34.2 and 136.8.
        (TWO, 171, {"a": 34, "b": 137}),
        # A kernel's sum is 4 + 4 + 3 + 3 = 14, the other 42: 13.5 and 40.5; "conv" sorts first.
        ({"conv": (4, 4, 3, 3), "linear": (14, 28)}, 54, {"conv": 14, "linear": 40}),
        # In the ratio of 4 to 60 to 60 the small one would get 16 of its 4 entries.
        ({"small": (2, 2), "a": (50, 10), "b": (10, 50)}, 500, {"small": 4, "a": 248, "b": 248}),
        # In the ratio of 21 to 8 to 40. At first only "a" has more than it can take; of the 100
        # that it leaves, "b" gets 16.7 of its 16.
        ({"a": (1, 20), "b": (4, 4), "c": (20, 20)}, 120, {"a": 20, "b": 16, "c": 84}),
    ],
)
def test_erk_is_that_worked_out_by_hand(shapes: Shapes, total: int, kept: dict[str, int]) -> None:
    assert kept_counts(shapes, 1 - total / numel(shapes), distribution=ERK) == kept


@examples
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_fewer_entries_in_all_never_mean_more_of_one_tensor(sizes: list[tuple[int, int]]) -> None:
    shapes = {f"t{number}": shape for number, shape in enumerate(sizes)}
    total = sum(a * b for a, b in sizes)
    before = erdos_renyi_kernel(shapes, 0)

    for keep in range(1, total + 1):
        now = erdos_renyi_kernel(shapes, keep)
        assert sum(now.values()) == keep
        assert all(before[name] <= now[name] <= math.prod(shapes[name]) for name in shapes)
        before = now


# -- a sparsity of one's own ----------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_a_tensor_with_its_own_sparsity_leaves_that_of_the_others_alone(
    distribution: Literal["uniform", "erk"],
) -> None:
    others: Shapes = {"a": (10, 10), "c": (40, 40)}
    shapes: Shapes = {"a": (10, 10), "b": (30, 10), "c": (40, 40)}

    kept = kept_counts(shapes, 0.9, distribution=distribution, own={"b": 0.5})

    assert kept == {**kept_counts(others, 0.9, distribution=distribution), "b": 150}
    assert list(kept) == ["a", "b", "c"]
    if distribution == "uniform":
        assert (kept["a"], kept["c"]) == (10, 160)
    dense = kept_counts(shapes, 0, distribution=distribution, own={"b": 0.5})
    assert dense == {"a": 100, "b": 150, "c": 1600}


# -- N:M ----------------------------------------------------------------------------------


def by_hand(score: Tensor, n: int, m: int) -> Tensor:
    """An oracle that sorts one group at a time."""
    mask = torch.zeros(score.shape, dtype=torch.bool)
    rows, inputs = score.shape[:2]
    flat, flat_mask = score.reshape(rows, inputs, -1), mask.view(rows, inputs, -1)
    for row, place in itertools.product(range(rows), range(flat.shape[2])):
        for start in range(0, inputs, m):
            group = flat[row, start : start + m, place].tolist()
            best = sorted(range(m), key=lambda at: (-group[at], at))[:n]
            flat_mask[row, [start + at for at in best], place] = True
    return mask


@st.composite
def scores(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    m = draw(st.integers(2, 8))
    n = draw(st.integers(1, m - 1))
    kernel = draw(st.sampled_from([(), (3,), (2, 3)]))
    shape = (draw(st.integers(1, 4)), m * draw(st.integers(1, 3)), *kernel)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    few_values = torch.randint(0, 4, shape, generator=generator)
    return few_values.float(), n, m


@examples
@given(scores())
def test_masks_are_those_of_one_group_at_a_time(drawn: tuple[Tensor, int, int]) -> None:
    score, n, m = drawn

    mask = n_of_m(score, n, m)

    assert mask.dtype == torch.bool
    assert torch.equal(mask, by_hand(score, n, m))


@pytest.mark.parametrize("chunk", [1, 24, 100])
def test_chunks_leave_no_trace(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    score = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))
    whole = n_of_m(score, 1, 4)
    monkeypatch.setattr(module, "CHUNK", chunk)

    assert torch.equal(n_of_m(score, 1, 4), whole)


def test_experts_count_as_matrices_by_themselves() -> None:
    stack, matrix = {"a": (64, 32), "e": (5, 32, 33)}, {"a": (64, 32), "e": (32, 33)}

    uniform = kept_counts(stack, 0.9, distribution="uniform", stacks={"e"})
    assert uniform["e"] == 5 * kept_counts(matrix, 0.9, distribution="uniform")["e"]
    # ERK makes a stack as dense as one of its matrices beside the others.
    kept = kept_counts(stack, 0.9, distribution="erk", stacks={"e"})
    densities = {name: kept[name] / math.prod(shape) for name, shape in stack.items()}
    expected = ((32 + 33) / (32 * 33)) / ((64 + 32) / (64 * 32))
    assert densities["e"] / densities["a"] == pytest.approx(expected, rel=0.01)
    assert sum(kept.values()) == round(0.1 * (64 * 32 + 5 * 32 * 33))


def test_equal_remainders_are_settled_by_name_and_not_by_order() -> None:
    forward: Shapes = {"a": (3, 3), "b": (3, 3), "c": (3, 3)}

    one = kept_counts(forward, 1 - 10 / 27, distribution=ERK)
    other = kept_counts(dict(reversed(forward.items())), 1 - 10 / 27, distribution=ERK)

    assert one == other == {"a": 4, "b": 3, "c": 3}
