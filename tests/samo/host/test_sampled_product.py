"""The kept entries of a product are those of the whole product, to one rounding."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from axsparse.samo.host import sparse_products as module
from axsparse.samo.host.compiled_loops import FEW, has_bf16_loops
from axsparse.samo.host.sparse_products import (
    COLUMNS,
    DENSEST,
    MOST_THREADS,
    TOKENS,
    can_sample,
    sampled_product,
)
from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.state_bytes import IndexKind
from axsparse.samo.tensor_state import TensorState

needs_instruction = pytest.mark.skipif(
    not has_bf16_loops(), reason="numba or AVX-512 BF16 is missing"
)
KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
SHAPES = [(40, 56), (1, COLUMNS), (37, COLUMNS + 1), (16, 2 * COLUMNS + 16), (300, 7)]
"""Rows and columns: multiples of a block that is transposed, and not; more columns than a panel."""


def masked(rows: int, columns: int, density: float = 0.1) -> Tensor:
    """A mask with rows of which nothing and of which everything is kept."""
    generator = torch.Generator().manual_seed(rows * columns)
    mask = torch.rand(rows, columns, generator=generator) < density
    mask[rows // 2] = True
    mask[rows // 3] = False
    mask[-1, -1] = True
    mask[0, 0] = False
    return mask


def whole_numbers(tokens: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, (tokens, columns), generator=generator).to(torch.bfloat16)


@needs_instruction
@pytest.mark.parametrize(
    "tokens", [0, 1, 63, 64, 65, 128, 200, TOKENS, TOKENS + 1, 3 * TOKENS + 70]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_whole_numbers_are_rounded_once(shape: tuple[int, int], tokens: int) -> None:
    """Every partial sum is exact, so whatever the order, only the last rounding counts."""
    rows, columns = shape
    mask = masked(rows, columns)
    outer, inner = whole_numbers(tokens, rows, 1), whole_numbers(tokens, columns, 2)
    exact = (outer.double().t() @ inner.double())[mask].to(torch.bfloat16)

    for kind in KINDS:
        found = sampled_product(outer, inner, make_index(mask.view(-1), kind))

        assert found.dtype == torch.bfloat16
        assert torch.equal(found, exact), kind


@needs_instruction
def test_sums_err_by_less_than_half_a_unit_and_what_fp32_adds() -> None:
    mask = masked(200, 600)
    generator = torch.Generator().manual_seed(3)
    outer, inner = (
        torch.randn(700, size, generator=generator).to(torch.bfloat16) for size in (200, 600)
    )
    exact = (outer.double().t() @ inner.double())[mask]
    found = sampled_product(outer, inner, make_index(mask.view(-1), "mask")).double()

    # Sums of 700 products of normal numbers lose some of 24 bits, next to the 8 of the result.
    assert ((found - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


@needs_instruction
def test_matrices_may_be_strided_and_have_numbers_that_are_none() -> None:
    mask = masked(48, 64)
    outer, inner = whole_numbers(48, 130, 1).t(), whole_numbers(130, 128, 2)[:, ::2]
    index = make_index(mask.view(-1), "mask")
    exact = (outer.double().t() @ inner.double())[mask].to(torch.bfloat16)
    assert torch.equal(sampled_product(outer, inner, index), exact)

    inner = inner.clone()
    inner[5, 9] = torch.inf
    inner[6, 11] = torch.nan
    found = torch.zeros(48, 64)
    found[mask] = sampled_product(outer, inner, index).float()
    is_strange = ~found.isfinite()
    assert is_strange.any()
    assert not is_strange[:, [*range(9), 10, *range(12, 64)]].any()
    assert found[:, 11][mask[:, 11]].isnan().all()


@needs_instruction
def test_a_factor_of_another_size_is_refused() -> None:
    index = make_index(masked(40, 56).view(-1), "mask")
    good = whole_numbers(70, 40, 1), whole_numbers(70, 56, 2)

    with pytest.raises(AssertionError, match="69 inputs for 70"):
        sampled_product(good[0], good[1][:69], index)
    with pytest.raises(AssertionError, match="40 rows for 39"):
        sampled_product(good[0][:, :39], good[1], index)
    with pytest.raises(AssertionError, match="float32"):
        sampled_product(good[0].float(), good[1], index)


def state(
    *shape: int, density: float = DENSEST / 2, dtype: torch.dtype = torch.bfloat16
) -> TensorState:
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[: int(density * weight.numel())] = True
    index: Index = FullIndex(weight.numel()) if density == 1 else make_index(mask, "mask")
    return TensorState("w", weight, index, decays=True)


@needs_instruction
@pytest.mark.parametrize("threads", [1, MOST_THREADS, MOST_THREADS + 1])
def test_one_thread_is_not_held_against_many(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert can_sample(state(200, 300)) == (threads <= MOST_THREADS)
    finally:
        torch.set_num_threads(before)


@needs_instruction
def test_large_matrices_in_bf16_are_sampled_where_little_is_kept() -> None:
    assert can_sample(state(200, 300))
    assert can_sample(state(200, 300, density=DENSEST))
    assert not can_sample(state(200, 300, density=DENSEST + 0.01))
    assert not can_sample(state(200, 300, density=1))
    assert not can_sample(state(200, 300, dtype=torch.float32))
    assert not can_sample(state(200, 300, dtype=torch.float16))
    assert not can_sample(state(200, 20, 15))
    assert not can_sample(state(FEW // 32, 32))


def test_nothing_is_sampled_without_a_compiler_or_the_instruction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_bf16_loops", lambda: False)

    assert not can_sample(state(200, 300))
