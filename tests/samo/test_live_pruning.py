"""Pruning of live state, and the digest by which replicas compare their masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from support.pruned import matrices
from support.runs import random_init
from torch import Tensor, nn

from axsparse.models.layer import Kind, Layer
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.masks import Masks, masks_digest, prune_in_place
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.selection import largest

TIES = {"head.weight": "embed.weight"}


def specs() -> list[Layer]:
    kinds: list[tuple[str, Kind]] = [("embed", "embedding"), ("block", "block"), ("head", "head")]
    return [Layer(name, lambda: nn.Linear(8, 8), kind, random_init) for name, kind in kinds]


MAGNITUDE = matrices(specs(), 0.75, include="blocks")
EVERYTHING = matrices(specs(), 0.75)


def build(
    masks: Masks | None, layers: Sequence[Layer] | None = None, *, half: bool = False
) -> list[BuiltLayer]:
    options = StateOptions(
        dtype=torch.bfloat16 if half else torch.float32,
        gradient_dtype=torch.float32,
        moments=ADAMW.moments,
        seed=1,
        masks=masks,
    )
    return build_layers(layers or specs(), TIES, options)


def trained(layers: list[BuiltLayer]) -> list[BuiltLayer]:
    """After one step, so that moments and weights are no longer those of the start."""
    for number, layer in enumerate(layers):
        for tensor in layer.state.tensors:
            generator = torch.Generator().manual_seed(number)
            layer.state.accumulate(tensor, torch.randn(tensor.parameter.shape, generator=generator))
        update([layer.state], ADAMW, Hyper(1, 0.1, (0.9, 0.95), 1e-8, 0.1), 1.0)
    return layers


def kept(layers: Sequence[BuiltLayer]) -> dict[str, Tensor]:
    return {
        tensor.name: tensor.index.positions() for layer in layers for tensor in layer.state.tensors
    }


@pytest.mark.parametrize("half", [True, False])
def test_the_largest_weights_of_now_stay_with_their_moments(half: bool) -> None:
    layers = trained(build(None, half=half))
    state = layers[1].state
    tensor = state.tensor("block.weight")
    mask = largest(state.master("block.weight").abs().clone(), 16)
    master = state.master("block.weight")[mask].clone()
    moments = {
        name: v[mask].clone() for name, v in state.optimizer_state.moments_of(tensor, 0, 64).items()
    }

    prune_in_place(layers, TIES, MAGNITUDE)

    assert torch.equal(tensor.index.positions(), mask.nonzero().view(-1))
    assert torch.equal(state.master("block.weight"), master)
    for name, values in state.optimizer_state.moments_of(tensor, 0, 16).items():
        assert torch.equal(values, moments[name])
    assert not tensor.weight_D[~mask].any()


@pytest.mark.parametrize(
    ("masks", "pruned"),
    [(MAGNITUDE, {"block.weight"}), (EVERYTHING, {"embed.weight", "block.weight", "head.weight"})],
)
def test_only_what_the_masks_name_is_pruned(masks: Masks, pruned: set[str]) -> None:
    layers = build(None)

    prune_in_place(layers, TIES, masks)

    for name, positions in kept(layers).items():
        numel = 64 if name.endswith("weight") else 8
        assert len(positions) == (16 if name in pruned else numel), name


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_pruning_fresh_state_is_building_it_pruned(
    method: Literal["magnitude", "random"],
) -> None:
    masks = matrices(specs(), 0.75, method)
    later, at_once = build(None), build(masks)

    prune_in_place(later, TIES, masks)

    for one, other in zip(later, at_once, strict=True):
        assert one.state.live_bytes() == other.state.live_bytes()
        for ours, theirs in zip(one.state.tensors, other.state.tensors, strict=True):
            assert torch.equal(ours.parameter, theirs.parameter)
            assert torch.equal(ours.index.positions(), theirs.index.positions())


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_both_uses_of_a_tied_weight_are_pruned_alike_on_one_stage_and_on_two(
    method: Literal["magnitude", "random"],
) -> None:
    masks = matrices(specs(), 0.75, method)
    together = build(None)
    apart = [build(None, [spec])[0] for spec in specs()]

    prune_in_place(together, TIES, masks)
    for layer in apart:
        prune_in_place([layer], TIES, masks)

    for name, positions in kept(apart).items():
        assert torch.equal(positions, kept(together)[name]), name
    assert torch.equal(kept(apart)["head.weight"], kept(apart)["embed.weight"])


# -- the digest -----------------------------------------------------------------------------


def test_equal_masks_have_equal_digests_whatever_the_weights() -> None:
    layers = build(MAGNITUDE)
    before = masks_digest(layers)

    trained(layers)

    assert masks_digest(layers) == before
    assert before == int(float(before)) < 2**52


def test_one_entry_moved_changes_the_digest() -> None:
    layers = build(MAGNITUDE)
    state = layers[1].state
    mask = torch.zeros(64, dtype=torch.bool)
    mask[state.tensor("block.weight").index.positions()] = True
    before = masks_digest(layers)

    gone, new = int(mask.nonzero()[0]), int((~mask).nonzero()[0])
    mask[gone], mask[new] = False, True
    state.remask("block.weight", mask)

    assert masks_digest(layers) != before


def test_the_name_of_a_tensor_is_part_of_the_digest() -> None:
    one, other = (
        build(None, [Layer(name, lambda: nn.Linear(8, 8), init=random_init)])
        for name in ("block", "block2")
    )

    assert masks_digest(one) != masks_digest(other)
