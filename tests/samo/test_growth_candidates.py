"""Candidates for growth: the strongest gradients at pruned positions, picked as they pass."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocated import peak_of
from torch import Tensor, nn

from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.selection import Candidates, no_candidates, strongest
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import IndexKind
from axsparse.samo.tensor_state import TensorState

KINDS: list[IndexKind] = ["int32", "mask"]
NUMELS = st.integers(2, 300)
FEW_VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.5, math.inf, math.nan, 1e-40])
RECALL, MASS = 0.8, 0.95
"""Of the exact choice that candidates find, by entries and by gradient (0.84 and 0.98 seen)."""


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_mask(seed: int, numel: int, density: float = 0.3) -> Tensor:
    return torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < density


def by_sorting(total: Tensor, mask: Tensor, count: int) -> Tensor:
    """Flat positions, ascending: sorted by magnitude, lower ones first among equals."""
    pruned = (~mask).nonzero().view(-1)
    score = torch.where(torch.isfinite(total), total, 0.0).abs()[pruned]
    best = torch.sort(score, descending=True, stable=True).indices[:count]
    return pruned[best].sort().values


def same(ours: Candidates, theirs: Candidates) -> bool:
    return torch.equal(ours.positions, theirs.positions) and torch.equal(ours.sums, theirs.sums)


# -- the choice -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), NUMELS, st.sampled_from(KINDS))
def test_the_strongest_pruned_positions_are_those_that_sorting_finds(
    data: st.DataObject, numel: int, kind: IndexKind
) -> None:
    values = torch.tensor(data.draw(st.lists(FEW_VALUES, min_size=numel, max_size=numel)))
    mask = random_mask(data.draw(st.integers(0, 99)), numel)
    mask[0] = False
    count = data.draw(st.integers(0, int((~mask).sum())))

    found = strongest(values.clone(), (), make_index(mask, kind), count)

    expected = by_sorting(values, mask, count)
    assert torch.equal(found.positions.long(), expected)
    assert torch.equal(found.sums, torch.where(torch.isfinite(values), values, 0.0)[expected])


def test_lists_add_to_what_is_there_in_their_order() -> None:
    """In fp32, 1e8 + 1 − 1e8 is 0 and not 1; an empty list adds nothing."""
    index = make_index(torch.tensor([True, False, False, False]))
    one, other = (
        Candidates(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([value, 0.5]))
        for value in (1.0, -1e8)
    )

    found = strongest(
        torch.tensor([7.0, 1e8, 0.25, 0.0]), (one, other, no_candidates(4, 2)), index, 2
    )

    assert found.positions.tolist() == [1, 2]
    assert found.sums.tolist() == [0.0, 1.25]


def test_kept_positions_never_win_in_tensors_of_many_blocks() -> None:
    mask = torch.ones(4 * BLOCK, dtype=torch.bool)
    mask[::4] = False

    found = strongest(1.0 + mask, (), make_index(mask), BLOCK)

    assert torch.equal(found.positions.long(), (~mask).nonzero().view(-1))


# -- in the backward --------------------------------------------------------------------------


def layer_of(mask: Tensor, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> LayerState:
    """A layer of one matrix, and of a second use of it."""
    weight = TensorState(
        "w", nn.Parameter(torch.zeros(mask.shape, dtype=dtype)), make_index(mask.view(-1)), True
    )
    tensors = [weight]
    if tied:
        second = nn.Parameter(weight.parameter.detach())
        tensors.append(TensorState("v", second, weight.index, True, alias_of=weight))
    return LayerState(
        "layer", tensors, StateTypes(dtype, "weight" if dtype == torch.float32 else "fp32")
    )


def collecting(layer: LayerState) -> GradientCollector:
    return GradientCollector([layer], lambda layer: None, nullcontext)


def backward(layer: LayerState, *gradients: Tensor) -> None:
    """One microbatch: these are the gradients of the layer's tensors."""
    uses = zip(layer.tensors, gradients, strict=True)
    torch.stack([(use.parameter * gradient).sum() for use, gradient in uses]).sum().backward()


MASK = random_mask(3, 600, 0.1).view(20, 30)
INDEX = make_index(MASK.view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_one_microbatch_the_candidates_are_the_strongest_and_the_kept_ones_are_summed(
    dtype: torch.dtype,
) -> None:
    layer, gradient = layer_of(MASK, dtype=dtype), random(1, 20, 30).to(dtype)
    collector = collecting(layer)

    collector.harvest({"w": 40})
    collector.begin()
    backward(layer, gradient)

    found = collector.harvested()["w"]
    assert found.nbytes == 40 * 8
    assert torch.equal(
        found.positions.long(), by_sorting(gradient.view(-1).float(), MASK.view(-1), 40)
    )
    assert torch.equal(found.sums, gradient.view(-1)[found.positions.long()].float())
    assert torch.equal(layer.gradient, gradient[MASK])
    assert layer.tensors[0].parameter.grad is None


def test_every_microbatch_adds_to_all_candidates_and_the_strongest_sums_stay() -> None:
    layer, gradients = layer_of(MASK), [random(seed, 20, 30) for seed in range(5)]
    collector = collecting(layer)

    collector.harvest({"w": 60})
    collector.begin()
    for gradient in gradients:
        backward(layer, gradient)

    listed = torch.zeros(600)
    for gradient in gradients:
        listed += gradient.view(-1)
        at = by_sorting(listed, MASK.view(-1), 60)
        listed = torch.zeros(600).index_copy_(0, at, listed[at])
    found = collector.harvested()["w"]
    assert torch.equal(found.positions.long(), listed.nonzero().view(-1))
    assert torch.equal(found.sums, listed[listed != 0])


def test_a_new_step_forgets_the_candidates_and_a_harvest_ends_with_what_it_gave() -> None:
    layer = layer_of(MASK)
    collector = collecting(layer)
    collector.harvest({"w": 40})
    collector.begin()
    backward(layer, random(1, 20, 30))

    collector.begin()
    backward(layer, random(2, 20, 30))
    second = collector.harvested()["w"]
    collector.begin()
    backward(layer, random(3, 20, 30))

    assert same(second, strongest(random(2, 600), (), INDEX, 40))
    assert collector.harvested() == {}


def test_each_use_of_a_tied_weight_has_candidates_of_its_own() -> None:
    layer = layer_of(MASK, tied=True)
    collector = collecting(layer)

    collector.harvest({"w": 30, "v": 40})
    collector.begin()
    backward(layer, random(1, 20, 30), random(2, 20, 30))

    found = collector.harvested()
    assert same(found["w"], strongest(random(1, 600), (), INDEX, 30))
    assert same(found["v"], strongest(random(2, 600), (), INDEX, 40))


# -- how good, and at what cost ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_picking_needs_five_bytes_an_entry_of_the_tensor_and_its_lists(kind: IndexKind) -> None:
    numel = 64 * BLOCK
    mask = random_mask(1, numel, 0.02)
    index, gradient = make_index(mask, kind), random(2, numel).bfloat16()
    count = index.kept
    listed = strongest(gradient.float(), (), index, count)

    def pick() -> None:
        strongest(gradient.to(torch.float32, copy=True), (listed,), index, count)

    peak = peak_of(pick)

    chunks = 40 * BLOCK  # histograms, and the scores that are read at a time
    assert 4 * numel < peak < 5 * numel + 24 * count + chunks
