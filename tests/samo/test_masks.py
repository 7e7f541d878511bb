"""The digests by which replicas compare masks and weights."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from support.runs import random_init
from torch import nn

from axsparse.models.layer import Layer
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.masks import masks_digest, weights_digest
from axsparse.samo.state_bytes import StateFormat


def build(rows: int = 8, columns: int = 8, *, name: str = "a", half: bool = False) -> BuiltLayer:
    dtype = torch.bfloat16 if half else torch.float32
    layer = Layer(name, partial(nn.Linear, columns, rows, bias=False), init=random_init)
    [built] = build_layers([layer], {}, StateOptions(StateFormat(dtype, torch.float32), 1, None))
    return built


def pruned(*removed: int, name: str = "a") -> BuiltLayer:
    built, mask = build(name=name), torch.ones(64, dtype=torch.bool)
    mask[list(removed)] = False
    built.state.remask(f"{name}.weight", mask)
    return built


def test_the_digest_is_of_names_and_masks_and_not_of_weights() -> None:
    built = pruned(0)
    before = masks_digest([built])
    built.module.get_parameter("weight").detach().mul_(2)
    assert masks_digest([built]) == before == int(float(before)) < 2**52

    others = [pruned(1), pruned(0, 1), pruned(), pruned(0, name="b")]
    assert len({before, *(masks_digest([other]) for other in others)}) == 5


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (64, 32), (131, 127)])
def test_the_digest_of_weights_sees_every_bit_and_where_it_is(
    rows: int, columns: int, half: bool
) -> None:
    """Also of words that fill no row, and of words that differ in their highest bit alone."""
    built = build(rows, columns, half=half)
    weight = built.module.get_parameter("weight").detach().view(-1)
    number = 8 // weight.itemsize
    words = weight[: len(weight) // number * number].view(torch.int64)
    before, draw = weights_digest([built]), Random(1)  # noqa: S311 - to be drawn again

    for _ in range(300):
        # Places of one row, of one column, among the last, or anywhere.
        first = draw.randrange(len(words)) if draw.random() < 0.7 else len(words) - 1
        second = (first - draw.choice((1, 512, draw.randrange(1, len(words))))) % len(words)
        if first == second:
            continue
        kept = words[[first, second]]
        if draw.random() < 0.5:  # neighbours in bits
            words[second] = words[first] ^ (-(1 << 63) if draw.random() < 0.5 else 1)
        alike = weights_digest([built])
        words[[first, second]] = words[[second, first]]
        assert weights_digest([built]) != alike
        words[[first, second]] = kept

    assert weights_digest([built]) == before == int(float(before)) < 2**52
    weight[-1] = -weight[-1]
    assert weights_digest([built]) != before
