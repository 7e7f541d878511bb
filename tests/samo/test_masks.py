"""The digests by which replicas compare masks and weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
from support.runs import matrices, random_init
from torch import nn

from axsparse.models.layer import Kind, Layer
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.masks import Masks, masks_digest, weights_digest
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.state_bytes import StateFormat

TIES = {"head.weight": "embed.weight"}


def specs() -> list[Layer]:
    kinds: list[tuple[str, Kind]] = [("embed", "embedding"), ("block", "block"), ("head", "head")]
    return [Layer(name, lambda: nn.Linear(8, 8), kind, random_init) for name, kind in kinds]


MAGNITUDE = matrices(specs(), 0.75, include="blocks")


def build(
    masks: Masks | None, layers: Sequence[Layer] | None = None, *, half: bool = False
) -> list[BuiltLayer]:
    dtype = torch.bfloat16 if half else torch.float32
    options = StateOptions(StateFormat(dtype, torch.float32, ADAMW.moments), seed=1, masks=masks)
    return build_layers(layers or specs(), TIES, options)


def trained(layers: list[BuiltLayer]) -> list[BuiltLayer]:
    """After one step, so that moments and weights have left their start values."""
    for number, layer in enumerate(layers):
        for tensor in layer.state.tensors:
            generator = torch.Generator().manual_seed(number)
            layer.state.accumulate(tensor, torch.randn(tensor.parameter.shape, generator=generator))
        update([layer.state], ADAMW, Hyper(1, 0.1, (0.9, 0.95), 1e-8, 0.1), 1.0)
    return layers


# -- the digest -----------------------------------------------------------------------------


def test_the_digest_is_of_names_and_masks_and_not_of_weights() -> None:
    layers = build(MAGNITUDE)
    before = masks_digest(layers)
    trained(layers)
    assert masks_digest(layers) == before == int(float(before)) < 2**52

    digests = {before}
    for removed in (0, 1):
        smaller = build(MAGNITUDE)
        state = smaller[1].state
        mask = state.mask("block.weight")
        mask[mask.nonzero()[removed]] = False
        state.remask("block.weight", mask)
        digests.add(masks_digest(smaller))
    assert len(digests) == 3

    one, other = (
        build(None, [Layer(name, lambda: nn.Linear(8, 8), init=random_init)])
        for name in ("block", "block2")
    )
    assert masks_digest(one) != masks_digest(other)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (64, 32), (131, 127)])
def test_the_digest_of_weights_sees_every_bit_and_where_it_is(
    rows: int, columns: int, half: bool
) -> None:
    """Also of words that fill no row, and of words that differ in their highest bit alone."""
    one = Layer("one", partial(nn.Linear, columns, rows, bias=False), init=random_init)
    layers = build(None, [one], half=half)
    weight = layers[0].module.get_parameter("weight").detach().view(-1)
    number = 8 // weight.itemsize
    words = weight[: len(weight) // number * number].view(torch.int64)
    before, draw = weights_digest(layers), Random(1)  # noqa: S311 - to be drawn again

    for _ in range(300):
        # Places of one row, of one column, among the last, or anywhere.
        first = draw.randrange(len(words)) if draw.random() < 0.7 else len(words) - 1
        far = draw.choice((1, 512, draw.randrange(1, len(words))))
        second = (first - far) % len(words)
        if first == second:
            continue
        kept = words[[first, second]]
        if draw.random() < 0.5:  # neighbours in bits
            words[second] = words[first] ^ (-(1 << 63) if draw.random() < 0.5 else 1)
        alike = weights_digest(layers)
        words[[first, second]] = words[[second, first]]
        assert weights_digest(layers) != alike
        words[[first, second]] = kept

    assert weights_digest(layers) == before == int(float(before)) < 2**52
    weight[-1] = -weight[-1]
    assert weights_digest(layers) != before
