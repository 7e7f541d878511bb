"""A sparsity is spread over tensors with exact counts, and patterns select tensors by name."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import tiny_config, tiny_gpt

from axsparse.config.model_config import GptConfig
from axsparse.models.survey import survey
from axsparse.models.zoo.gpt import gpt
from axsparse.pruning.distribution import erdos_renyi_kernel, kept_counts, kept_entries, match
from axsparse.pruning.targets import find_targets
from axsparse.runtime.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

examples = settings(max_examples=150, deadline=None, derandomize=True)
shapes_of_models = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple),
    min_size=1,
    max_size=8,
)
sparsities = st.floats(0, 1, exclude_max=True)
distributions = pytest.mark.parametrize("distribution", ["uniform", "erk"])
ERK: Literal["erk"] = "erk"


def numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def gpt_names() -> list[str]:
    layers = gpt(GptConfig(num_layers=2, hidden_size=8, num_heads=2), 16).layers
    return [
        f"{layer.name}.{name}"
        for layer in layers
        if layer.kind == "block"
        for name, parameter in layer.build().named_parameters()
        if parameter.dim() > 1
    ]


# -- counts ---------------------------------------------------------------------------------


@examples
@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_tensor_loses_its_share_rounded_to_whole_entries(numel: int, sparsity: float) -> None:
    kept = kept_entries(numel, sparsity)

    assert kept == numel - round(sparsity * numel)
    assert 0 <= kept <= numel


# -- uniform --------------------------------------------------------------------------------


@examples
@given(shapes_of_models, sparsities)
def test_uniform_removes_the_same_share_of_every_tensor(shapes: Shapes, sparsity: float) -> None:
    kept = kept_counts(shapes, sparsity, distribution="uniform")

    assert kept == {
        name: math.prod(shape) - round(sparsity * math.prod(shape))
        for name, shape in shapes.items()
    }


# -- Erdős–Rényi kernel ---------------------------------------------------------------------


@examples
@given(shapes_of_models, sparsities)
def test_erk_keeps_the_total_exactly_and_no_tensor_more_than_it_has(
    shapes: Shapes, sparsity: float
) -> None:
    kept = kept_counts(shapes, sparsity, distribution=ERK)

    assert sum(kept.values()) == numel(shapes) - round(sparsity * numel(shapes))
    assert list(kept) == list(shapes)
    assert all(0 <= kept[name] <= math.prod(shape) for name, shape in shapes.items())


@examples
@given(shapes_of_models, sparsities)
def test_erk_densities_are_within_one_entry_of_one_common_factor(
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


def test_equal_remainders_are_settled_by_name_and_not_by_order() -> None:
    forward: Shapes = {"a": (3, 3), "b": (3, 3), "c": (3, 3)}

    one = kept_counts(forward, 1 - 10 / 27, distribution=ERK)
    other = kept_counts(dict(reversed(forward.items())), 1 - 10 / 27, distribution=ERK)

    assert one == other == {"a": 4, "b": 3, "c": 3}


@distributions
def test_sparsity_zero_keeps_everything(distribution: Literal["uniform", "erk"]) -> None:
    assert kept_counts({"a": (2, 3), "b": (5, 7)}, 0, distribution=distribution) == {
        "a": 6,
        "b": 35,
    }


# -- a sparsity of one's own ----------------------------------------------------------------


@distributions
def test_a_tensor_with_its_own_sparsity_leaves_that_of_the_others_alone(
    distribution: Literal["uniform", "erk"],
) -> None:
    others: Shapes = {"a": (10, 10), "c": (40, 40)}
    shapes: Shapes = {"a": (10, 10), "b": (30, 10), "c": (40, 40)}

    kept = kept_counts(shapes, 0.9, distribution=distribution, own={"b": 0.5})

    assert kept == {**kept_counts(others, 0.9, distribution=distribution), "b": 150}
    assert list(kept) == ["a", "b", "c"]


@pytest.mark.parametrize("entry", ["block0.*", "=0.5", "block0.*=1", "block0.*=half"])
def test_an_entry_that_names_no_tensors_or_no_sparsity_is_refused(entry: str) -> None:
    config = tiny_config(pruning={"layers": [entry]})
    with pytest.raises(
        ConfigError,
        match="is not pattern=sparsity with a sparsity from 0 to below 1; write it like "
        r"block0\.\*=0\.5",
    ):
        find_targets(survey(tiny_gpt(config), torch.float32), config.pruning)


@distributions
def test_all_tensors_may_have_their_own(distribution: Literal["uniform", "erk"]) -> None:
    own = {"a": 0.5, "b": 0.0}

    assert kept_counts({"a": (4, 4), "b": (2, 2)}, 0.9, distribution=distribution, own=own) == {
        "a": 8,
        "b": 4,
    }


# -- patterns -------------------------------------------------------------------------------


def test_patterns_mean_tensors_of_a_gpt_by_their_global_names() -> None:
    names = gpt_names()

    assert match(["block1.*"], names, "k") == [
        "block1.attention.qkv.weight",
        "block1.attention.proj.weight",
        "block1.fc1.weight",
        "block1.fc2.weight",
    ]
    assert match(["*.fc?.weight", "block0.fc1.weight"], names, "k") == [
        "block0.fc1.weight",
        "block0.fc2.weight",
        "block1.fc1.weight",
        "block1.fc2.weight",
    ]
    assert match([], names, "k") == []


def test_the_case_of_a_pattern_counts() -> None:
    with pytest.raises(ConfigError, match="matches no tensor that could be pruned"):
        match(["BLOCK*"], gpt_names(), "k")


def test_a_pattern_that_means_nothing_is_told_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError) as refused:
        match(["block0.*", "block1.attn.qkv.weight"], gpt_names(), "pruning.exclude (a.yaml)")

    assert str(refused.value) == (
        "pruning.exclude (a.yaml): 'block1.attn.qkv.weight' matches no tensor that could be "
        "pruned; nearest: block1.attention.qkv.weight, block0.attention.qkv.weight, "
        "block1.attention.proj.weight"
    )


def test_a_pattern_for_a_model_of_which_nothing_is_pruned_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="nearest: none"):
        match(["*"], [], "pruning.exclude")
