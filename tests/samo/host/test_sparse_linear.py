"""Products with a weight of which little is kept are those with the dense one, to one rounding."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from axsparse.samo.host import sparse_products as module
from axsparse.samo.host.compiled_loops import has_bf16_loops
from axsparse.samo.host.sparse_products import (
    DENSEST,
    DENSEST_WITH_AMX,
    DEPTH,
    LINES,
    STRETCH,
    can_multiply,
    sparse_input_gradient,
    sparse_linear,
)
from axsparse.samo.index.base import make_index
from axsparse.samo.tensor_state import TensorState

pytestmark = pytest.mark.skipif(not has_bf16_loops(), reason="numba or AVX-512 is missing")
SHAPES = [
    (1, 1),
    (40, 56),
    (37, DEPTH + 1),
    (LINES + 3, 70),
    (2 * LINES, 2 * DEPTH + 16),
    (5, DEPTH),
]
"""Outputs and inputs: multiples of a block that is transposed, and not; more than one stretch."""


def whole_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, shape, generator=generator).to(torch.bfloat16)


def pruned(outputs: int, inputs: int, density: float = 0.1) -> Tensor:
    """A weight with lines of which nothing and of which everything is kept."""
    weight = whole_numbers(outputs, inputs, seed=outputs * inputs)
    generator = torch.Generator().manual_seed(outputs)
    mask = torch.rand(outputs, inputs, generator=generator) < density
    mask[outputs // 3] = False
    mask[:, inputs // 3] = False
    mask[outputs // 2] = True
    mask[:, inputs // 2] = True
    return weight * mask


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 63, 64, 65, 200, STRETCH + 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_whole_numbers_are_rounded_once(shape: tuple[int, int], tokens: int) -> None:
    """Every partial sum is exact, so whatever the order, only the last rounding counts."""
    weight = pruned(*shape)
    outputs, inputs = shape
    rows, outer = whole_numbers(tokens, inputs, seed=1), whole_numbers(tokens, outputs, seed=2)
    bias = whole_numbers(outputs, seed=3) / 4

    exact = rows.double() @ weight.double().t()
    assert torch.equal(sparse_linear(rows, weight, None), exact.to(torch.bfloat16))
    exact += bias.double()
    assert torch.equal(sparse_linear(rows, weight, bias), exact.to(torch.bfloat16))
    exact = outer.double() @ weight.double()
    assert torch.equal(sparse_input_gradient(outer, weight), exact.to(torch.bfloat16))


def test_a_weight_that_is_not_pruned_gives_the_dense_product() -> None:
    weight = whole_numbers(LINES + 9, DEPTH + 40, seed=1)
    rows = whole_numbers(70, DEPTH + 40, seed=2)

    exact = (rows.double() @ weight.double().t()).to(torch.bfloat16)
    assert torch.equal(sparse_linear(rows, weight, None), exact)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def test_sums_err_by_less_than_half_a_unit_and_what_fp32_adds() -> None:
    weight = drawn(600, 700, seed=1) * (pruned(600, 700) != 0)
    rows, outer, bias = drawn(300, 700, seed=2), drawn(300, 600, seed=3), drawn(600, seed=4)
    found = sparse_linear(rows, weight, bias), sparse_input_gradient(outer, weight)
    exact = (
        nn.functional.linear(rows.double(), weight.double(), bias.double()),
        outer.double() @ weight.double(),
    )

    for one, other in zip(found, exact, strict=True):
        assert ((one.double() - other).abs() <= other.abs() * 2.0**-8 + 1e-4).all()


def test_ties_are_rounded_to_even_as_torch_does() -> None:
    """A one and a small bias give sums between two numbers of bf16."""
    bias = torch.arange(-300, 300).to(torch.float32)
    sums = bias + 2.0**-1 * torch.arange(600).remainder(5)
    weight = torch.zeros(600, 64)
    weight[:, 0], weight[:, 1] = bias, sums - bias
    weight = weight.to(torch.bfloat16)
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    rows[:, :2] = 1

    exact = weight[:, :2].double().sum(1).to(torch.bfloat16)
    assert torch.equal(sparse_linear(rows, weight, None), exact.expand(2, 600))


def test_a_token_has_the_same_bits_in_every_company() -> None:
    weight = drawn(300, 600, seed=1) * (pruned(300, 600) != 0)
    rows, outer = drawn(STRETCH + 200, 600, seed=2), drawn(STRETCH + 200, 300, seed=3)
    whole = sparse_linear(rows, weight, None), sparse_input_gradient(outer, weight)

    for begin, end in ((0, 1), (5, 100), (64, 128), (1000, STRETCH + 200)):
        assert torch.equal(sparse_linear(rows[begin:end], weight, None), whole[0][begin:end])
        assert torch.equal(sparse_input_gradient(outer[begin:end], weight), whole[1][begin:end])


def test_matrices_may_be_strided() -> None:
    weight = pruned(96, 80)
    rows = whole_numbers(80, 130, seed=1).t()
    exact = (rows.double() @ weight.double().t()).to(torch.bfloat16)
    assert torch.equal(sparse_linear(rows, weight, None), exact)

    outer = whole_numbers(1, 96, seed=2).expand(70, 96)
    exact = (outer.double() @ weight.double()).to(torch.bfloat16)
    assert torch.equal(sparse_input_gradient(outer, weight), exact)
    assert torch.equal(sparse_input_gradient(outer, weight.t().contiguous().t()), exact)


def test_numbers_that_are_none_reach_what_depends_on_them() -> None:
    weight = pruned(48, 64)
    rows = whole_numbers(70, 64, seed=1)
    rows[3, 5], rows[4, 6] = torch.inf, torch.nan
    found = sparse_linear(rows, weight, None)

    assert found[3][weight[:, 5] != 0].isinf().all()
    assert found[3][weight[:, 5] == 0].isfinite().all()
    assert found[4][weight[:, 6] != 0].isnan().all()
    assert found[[*range(3), *range(5, 70)]].isfinite().all()
    large = torch.full((1, 64), 3e38).to(torch.bfloat16)
    assert sparse_linear(large, weight, None).isinf().any()


@pytest.mark.parametrize("bits", [0x7FFF, -1, 0x7F81, 0x7FC0])
def test_every_nan_stays_one(bits: int) -> None:
    """Also the one whose bits are all set, to which rounding must not add."""
    rows, weight = torch.ones(3, 64, dtype=torch.bfloat16), pruned(40, 64)
    rows[1, 5] = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)

    found = sparse_linear(rows, weight, None)

    assert found[1][weight[:, 5] != 0].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_the_smallest_normal_weight_counts() -> None:
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)
    weight[3, 5] = smallest = torch.finfo(torch.bfloat16).smallest_normal
    rows = torch.full((2, 64), 2.0**120, dtype=torch.bfloat16)

    assert sparse_linear(rows, weight, None)[:, 3].tolist() == [smallest * 2.0**120] * 2


def test_threads_do_not_disturb_each_other() -> None:
    weight = pruned(300, 600)
    cases = [whole_numbers(400, 600, seed=seed) for seed in range(4)]
    expected = [sparse_linear(rows, weight, None) for rows in cases]
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        found[number] = [sparse_linear(cases[number], weight, None) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, products in found.items():
        assert all(torch.equal(product, expected[number]) for product in products)
    assert len(found) == 4


def test_factors_of_another_size_or_type_are_refused() -> None:
    weight = pruned(40, 56)
    rows, bias = whole_numbers(70, 56, seed=1), whole_numbers(40, seed=2)

    with pytest.raises(AssertionError, match=r"\(70, 55\) for 56"):
        sparse_linear(rows[:, :55], weight, bias)
    with pytest.raises(AssertionError, match=r"\(39,\) for 40"):
        sparse_linear(rows, weight, bias[:39])
    with pytest.raises(AssertionError, match=r"\(70, 56\) for 40"):
        sparse_input_gradient(rows, weight)
    with pytest.raises(AssertionError, match="float32"):
        sparse_linear(rows.float(), weight, bias)
    with pytest.raises(AssertionError, match="float32"):
        sparse_linear(rows, weight.float(), bias)


@pytest.mark.parametrize("has_amx", [False, True])
def test_processors_for_matrices_have_more_of_them_dense(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "multiplies_matrices", lambda: has_amx)

    def state(density: float) -> TensorState:
        weight = nn.Parameter(torch.zeros(200, 300, dtype=torch.bfloat16))
        mask = torch.arange(weight.numel()) < density * weight.numel()
        return TensorState("w", weight, make_index(mask, "mask"), decays=True)

    assert can_multiply(state(DENSEST_WITH_AMX))
    assert can_multiply(state(DENSEST_WITH_AMX + 0.01)) == (not has_amx)
    assert can_multiply(state(DENSEST)) == (not has_amx)
    assert not can_multiply(state(DENSEST + 0.01))
