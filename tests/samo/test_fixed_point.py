"""Exact sums: integers that add to the same bits in any order, and the units they are made of."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_contract import layer_of
from torch import Tensor

from axsparse.samo import fixed_point
from axsparse.samo.fixed_point import CHUNK, FIRST_LARGEST, LEAST_BITS, MARGIN, Units, add, in_fp32
from axsparse.samo.host.compiled_loops import FEW, can_compile

UNIT = 2.0**-40
NAME = "layer.weight"


def parts_of(number: int, size: int, binades: int = 43) -> list[Tensor]:
    """Gradients of microbatches, with entries of many sizes."""
    generator = torch.Generator().manual_seed(number)
    return [
        torch.randn(size, generator=generator)
        * torch.exp2(-torch.randint(binades, (size,), generator=generator).float())
        for _ in range(number)
    ]


def summed(parts: list[Tensor], unit: float = UNIT) -> Tensor:
    sums = torch.full((parts[0].numel(),), 5, dtype=torch.int64)
    for number, part in enumerate(parts):
        add(sums, part, unit, torch.zeros(1), adds=number > 0)
    in_fp32(sums, slice(0, sums.numel()), unit)
    return sums.view(torch.float32)[: sums.numel()]


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_order_and_any_grouping_gives_the_same_bits(
    number: int, seed: int, dtype: torch.dtype
) -> None:
    parts = [part.to(dtype) for part in parts_of(number, 33)]
    expected = summed(parts)
    random.Random(seed).shuffle(parts)  # noqa: S311  # an order, no secret

    assert torch.equal(summed(parts), expected)
    half = torch.zeros(2, 33, dtype=torch.int64)
    for at, part in enumerate(parts):
        add(half[at % 2], part, UNIT, torch.zeros(1), adds=True)
    both = half[0] + half[1]
    in_fp32(both, slice(0, 33), UNIT)
    assert torch.equal(both.view(torch.float32)[:33], expected)


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 7])
def test_gradients_are_made_in_the_memory_of_their_sums(size: int) -> None:
    """The tensor before it in the buffer is read first, and what is made of it stays."""
    sums = torch.arange(3 + size)
    in_fp32(sums, slice(0, 3), 2.0)
    in_fp32(sums, slice(3, 3 + size), 0.5)
    found = sums.view(torch.float32)[: 3 + size]

    expected = torch.arange(3 + size).float() * 0.5
    expected[:3] *= 4
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_largest_entry_tells_what_is_not_finite(value: float) -> None:
    values = torch.zeros(CHUNK + 5)
    values[2], values[-1] = -3.0, value
    sums = torch.zeros(CHUNK + 5, dtype=torch.int64)

    most = torch.zeros(1)
    add(sums[:9], values[:9], 0.5, most, adds=False)
    assert most.item() == 3.0
    add(sums, values, 0.5, most, adds=True)
    assert not math.isfinite(most.item())
    add(sums[:9], values[3:12], 0.5, most, adds=True)
    assert not math.isfinite(most.item()), "it stays so"


def passes(units: Units, largest: float) -> int:
    """How often a step is computed whose largest entry is given."""
    for number in range(1, 40):
        fit = units.fit(largest / units.unit(NAME))
        if units.follow({} if fit is None else {NAME: fit}):
            return number
    raise AssertionError("it does not end")


def test_a_unit_falls_slowly_to_where_the_margin_is_left() -> None:
    units = Units(1, {})
    assert units.unit(NAME) * units.limit == 2.0**FIRST_LARGEST

    assert [passes(units, 0.7) for _ in range(30)] == [1] * 30
    assert units.unit(NAME) * units.limit == 2.0**MARGIN


@pytest.mark.parametrize("microbatches", [1, 24, 512, 1 << 20])
@pytest.mark.parametrize("exponent", [-140, -60, -20, 0, 9, 11, 40, 48, 120])
def test_a_step_of_any_size_is_computed_until_it_fits_and_the_next_one_once(
    exponent: int, microbatches: int
) -> None:
    units = Units(microbatches, {})
    passes(units, 1e-3)

    assert passes(units, 2.0**exponent) <= 1 + 150 // units._jump
    assert 2.0**LEAST_BITS <= 2.0**exponent / units.unit(NAME) <= units.limit
    assert passes(units, 2.0**exponent) == 1
    assert passes(units, 1e-3) <= 1 + 150 // units._jump
    assert 1e-3 / units.unit(NAME) >= 2.0**LEAST_BITS, "it is not lost for ever"


@pytest.mark.skipif(not can_compile(), reason="needs numba")
@pytest.mark.parametrize("unit", [2.0**-57, 2.0**-30, 2.0**-10, 2.0**5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_loop_has_the_bits_of_torchs_operations(
    dtype: torch.dtype, unit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = parts_of(1, FEW + 9)[0].to(dtype)
    start = torch.randint(-(2**61), 2**61, (FEW + 9,), generator=torch.Generator().manual_seed(1))
    for adds in (True, False):
        ours, plain, most = start.clone(), start.clone(), torch.tensor([[0.1], [0.1]])
        with mock.patch.object(fixed_point, "ADD", wraps=fixed_point.ADD) as loop:
            add(ours, values, unit, most[0], adds=adds)
        assert loop.called
        monkeypatch.setattr(fixed_point, "can_compile", lambda: False)
        add(plain, values, unit, most[1], adds=adds)
        monkeypatch.undo()
        assert torch.equal(ours, plain)
        assert most[0].item() == most[1].item() == values.abs().max().item()


def test_a_step_knows_the_largest_entry_of_all_its_microbatches() -> None:
    mask = torch.tensor([True, False, True])
    layer, tensor = layer_of(mask, torch.float32, torch.int64)
    tensor.unit = 0.5

    for gradient in ([1.0, 99.0, -2.0], [-4.0, 0.0, 0.5], [0.5, 0.0, 0.0]):
        layer.accumulate(tensor, torch.tensor(gradient))

    assert tensor.most.item() == 4.0 and torch.equal(layer.most, tensor.most)
    layer.finish_gradient()
    assert layer.gradient_of(tensor).tolist() == [-2.5, -1.5]
