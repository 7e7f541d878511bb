"""Products with a weight of which little is kept are those with the dense one, to one rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support.runs import default_dtype
from torch import Tensor, nn

from axsparse.samo.host import sparse_products as module
from axsparse.samo.host.compiled_loops import COLUMNS, DEPTH, FEW, LENGTHS, LINES, has_bf16_loops
from axsparse.samo.host.sparse_products import (
    DENSEST,
    DENSEST_SAMPLED,
    DENSEST_WITH_AMX,
    MOST_THREADS,
    STRETCH,
    can_multiply,
    can_sample,
    sampled_product,
    sparse_input_gradient,
    sparse_linear,
)
from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.state_bytes import IndexKind
from axsparse.samo.tensor_state import TensorState

TOKENS = LENGTHS[-1]

needs_instructions = pytest.mark.skipif(
    not has_bf16_loops(), reason="numba or AVX-512 BF16 is missing"
)
KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
SHAPES = [(1, 1), (40, 56), (37, DEPTH + 1), (LINES + 3, 70), (2 * LINES, 2 * DEPTH + 16), (300, 7)]
"""Outputs and inputs: multiples of a block that is transposed, and not; more than one stretch."""


def whole_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, shape, generator=generator).to(torch.bfloat16)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def masked(outputs: int, inputs: int, density: float = 0.1) -> Tensor:
    """A mask with lines of which nothing and of which everything is kept."""
    generator = torch.Generator().manual_seed(outputs)
    mask = torch.rand(outputs, inputs, generator=generator) < density
    mask[outputs // 3] = False
    mask[:, inputs // 3] = False
    mask[outputs // 2] = True
    mask[:, inputs // 2] = True
    mask[-1, -1] = True
    return mask


def pruned(outputs: int, inputs: int) -> Tensor:
    return whole_numbers(outputs, inputs, seed=outputs * inputs) * masked(outputs, inputs)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The exact output, rounded once."""
    exact = rows.double() @ weight.double().t()
    return (exact if bias is None else exact + bias.double()).to(torch.bfloat16)


@needs_instructions
@pytest.mark.parametrize(
    "tokens", [0, 1, 15, 16, 63, 64, 65, 128, 200, TOKENS + 1, 3 * TOKENS + 70, STRETCH + 70]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_whole_numbers_are_rounded_once(shape: tuple[int, int], tokens: int) -> None:
    """Every partial sum is exact, so whatever the order, only the last rounding counts."""
    outputs, inputs = shape
    mask, weight = masked(*shape), pruned(*shape)
    rows, outer = whole_numbers(tokens, inputs, seed=1), whole_numbers(tokens, outputs, seed=2)
    bias = whole_numbers(outputs, seed=3) / 4

    assert torch.equal(sparse_linear(rows, weight, None), linear(rows, weight))
    assert torch.equal(sparse_linear(rows, weight, bias), linear(rows, weight, bias))
    exact = (outer.double() @ weight.double()).to(torch.bfloat16)
    assert torch.equal(sparse_input_gradient(outer, weight), exact)
    exact = (outer.double().t() @ rows.double())[mask].to(torch.bfloat16)
    for kind in KINDS:
        index = make_index(mask.view(-1), kind)
        if not isinstance(index, FullIndex):
            assert torch.equal(sampled_product(outer, rows, index), exact), kind


@needs_instructions
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_do_not_depend_on_torchs_default_type(dtype: torch.dtype) -> None:
    weight, rows, outer = pruned(40, 56), drawn(70, 56, seed=1), drawn(70, 40, seed=2)
    index = make_index(masked(40, 56).view(-1))
    expected = sparse_linear(rows, weight, None), sampled_product(outer, rows, index)

    with default_dtype(dtype):
        found = sparse_linear(rows, weight, None), sampled_product(outer, rows, index)

    assert all(map(torch.equal, found, expected))


@needs_instructions
def test_sums_err_by_less_than_half_a_unit_and_what_fp32_adds() -> None:
    mask = masked(600, COLUMNS + 188)
    weight = drawn(*mask.shape, seed=1) * mask
    rows, outer, bias = (
        drawn(700, mask.shape[1], seed=2),
        drawn(700, 600, seed=3),
        drawn(600, seed=4),
    )
    index = make_index(mask.view(-1), "mask")
    pairs = [
        (
            sparse_linear(rows, weight, bias),
            nn.functional.linear(rows.double(), weight.double(), bias.double()),
        ),
        (sparse_input_gradient(outer, weight), outer.double() @ weight.double()),
        (sampled_product(outer, rows, index), (outer.double().t() @ rows.double())[mask]),
    ]

    # Sums of 700 products of normal numbers lose some of 24 bits, next to the 8 of the result.
    for one, other in pairs:
        assert ((one.double() - other).abs() <= other.abs() * 2.0**-8 + 1e-4).all()


@needs_instructions
def test_a_token_has_the_same_bits_in_every_company() -> None:
    weight = drawn(300, 600, seed=1) * (pruned(300, 600) != 0)
    rows, outer = drawn(STRETCH + 200, 600, seed=2), drawn(STRETCH + 200, 300, seed=3)
    whole = sparse_linear(rows, weight, None), sparse_input_gradient(outer, weight)

    for begin, end in ((0, 1), (5, 100), (64, 128), (1000, STRETCH + 200)):
        assert torch.equal(sparse_linear(rows[begin:end], weight, None), whole[0][begin:end])
        assert torch.equal(sparse_input_gradient(outer[begin:end], weight), whole[1][begin:end])


@needs_instructions
def test_factors_of_another_size_or_type_are_refused() -> None:
    weight, index = pruned(40, 56), make_index(masked(40, 56).view(-1), "mask")
    rows, outer = whole_numbers(70, 56, seed=1), whole_numbers(70, 40, seed=2)
    bias = whole_numbers(40, seed=3)
    rejected: list[tuple[Callable[..., Tensor], tuple[object, ...], str]] = [
        (sparse_linear, (rows[:, :55], weight, bias), r"\(70, 55\) for 56"),
        (sparse_linear, (rows, weight, bias[:39]), r"\(39,\) for 40"),
        (sparse_input_gradient, (rows, weight), r"\(70, 56\) for 40"),
        (sparse_linear, (rows.float(), weight, bias), "float32"),
        (sparse_linear, (rows, weight.float(), bias), "float32"),
        (sampled_product, (outer, rows[:69], index), "69 inputs for 70"),
        (sampled_product, (outer[:, :39], rows, index), "40 rows for 39"),
        (sampled_product, (outer.float(), rows, index), "float32"),
    ]
    for function, arguments, why in rejected:
        with pytest.raises(AssertionError, match=why):
            function(*arguments)


# -- which products ---------------------------------------------------------------------------


def state(
    *shape: int, density: float = DENSEST_SAMPLED / 2, dtype: torch.dtype = torch.bfloat16
) -> TensorState:
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    mask = torch.arange(weight.numel()) < int(density * weight.numel())
    index: Index = FullIndex(weight.numel()) if density == 1 else make_index(mask, "mask")
    return TensorState("w", weight, index, decays=True)


LITTLE = state(200, 300)


@pytest.mark.parametrize(
    ("tensor", "machine", "expected"),
    [
        (LITTLE, {}, True),
        (LITTLE, {"threads": MOST_THREADS}, True),
        (LITTLE, {"threads": MOST_THREADS + 1}, False),
        (LITTLE, {"has_bf16_loops": False}, False),
        (state(200, 300, density=DENSEST_SAMPLED), {}, True),
        (state(200, 300, density=DENSEST_SAMPLED + 0.01), {}, False),
        (state(200, 300, density=1), {}, False),
        (state(200, 300, dtype=torch.float32), {}, False),
        (state(200, 300, dtype=torch.float16), {}, False),
        (state(200, 20, 15), {}, False),
        (state(FEW // 32, 32), {}, False),
    ],
)
def test_large_matrices_in_bf16_are_sampled_where_little_is_kept(
    tensor: TensorState, machine: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product is computed, so no processor needs to have them."""
    monkeypatch.setattr(module, "has_bf16_loops", lambda: machine.get("has_bf16_loops", True))
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.get("threads", 1))

    assert can_sample(tensor) == expected


@pytest.mark.parametrize("has_amx", [False, True])
def test_processors_for_matrices_have_more_of_them_dense(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_bf16_loops", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(module, "multiplies_matrices", lambda: has_amx)

    assert can_multiply(state(200, 300, density=DENSEST_WITH_AMX))
    assert can_multiply(state(200, 300, density=DENSEST_WITH_AMX + 0.01)) == (not has_amx)
    assert can_multiply(state(200, 300, density=DENSEST)) == (not has_amx)
    assert not can_multiply(state(200, 300, density=DENSEST + 0.01))


@needs_instructions
def test_numbers_that_are_none_reach_what_depends_on_them() -> None:
    mask, weight = masked(48, 64), pruned(48, 64)
    rows, outer = whole_numbers(70, 64, seed=1), whole_numbers(70, 48, seed=2).abs() + 1
    rows[3, 5], rows[4, 6] = torch.inf, torch.nan
    found = sparse_linear(rows, weight, None)
    gradient = torch.zeros(48, 64)
    gradient[mask] = sampled_product(outer, rows, make_index(mask.view(-1), "mask")).float()

    assert found[3][weight[:, 5] != 0].isinf().all()
    assert found[3][weight[:, 5] == 0].isfinite().all()
    assert found[4][weight[:, 6] != 0].isnan().all()
    assert found[[*range(3), *range(5, 70)]].isfinite().all()
    assert gradient[:, 5][mask[:, 5]].isinf().all()
    assert gradient[:, 6][mask[:, 6]].isnan().all()
    assert gradient[:, [*range(5), *range(7, 64)]].isfinite().all()
    large = torch.full((1, 64), 3e38).to(torch.bfloat16)
    assert sparse_linear(large, weight, None).isinf().any()


@needs_instructions
@pytest.mark.parametrize("bits", [0x7FFF, -1, 0x7F81, 0x7FC0])
def test_every_nan_stays_one(bits: int) -> None:
    """Also the one whose bits are all set, to which rounding must not add."""
    rows, weight = torch.ones(3, 64, dtype=torch.bfloat16), pruned(40, 64)
    rows[1, 5] = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)

    found = sparse_linear(rows, weight, None)

    assert found[1][weight[:, 5] != 0].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_scratch_memory_is_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert module._Scratch().lines.shape == (LINES, DEPTH)
