"""Kept positions in every encoding: any mask, on tensors of one to five dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernel_contract import random_mask, state_of
from torch import Tensor

from axsparse.samo import state_bytes as memory
from axsparse.samo.backend import HOST
from axsparse.samo.host.compiled_loops import FEW, can_compile
from axsparse.samo.index import base
from axsparse.samo.index.base import FullIndex, Index, Int32Index, MaskIndex, make_index
from axsparse.samo.precision import round_to
from axsparse.samo.state_bytes import IndexKind, StateFormat, index_bytes

PIECE = 65_536
KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
examples = settings(max_examples=60, deadline=None, derandomize=True)
masks = st.lists(st.booleans(), max_size=80).map(lambda bits: torch.tensor(bits, dtype=torch.bool))
kinds = st.sampled_from(KINDS)


@pytest.fixture(scope="module", autouse=True)
def machine_code_for_all() -> Iterator[None]:
    """Small tensors, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "FEW", 0)
        yield


@pytest.fixture(params=["numpy", "machine code"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of a mask: with and without a compiler."""
    if request.param == "numpy":
        monkeypatch.setattr(base, "can_compile", lambda: False)
    elif not can_compile():
        pytest.skip("numba is not installed")


def numbers(count: int) -> Tensor:
    """Distinct values, none of them zero."""
    return torch.arange(1.0, count + 1)


@examples
@given(masks, st.integers(0, 80), st.integers(0, 80), st.integers(1, 9), kinds)
def test_an_index_gathers_and_scatters_stretches_and_costs_what_the_formula_says(
    mask: Tensor, one: int, other: int, piece: int, kind: IndexKind
) -> None:
    index = make_index(mask, kind)
    start, stop = sorted((min(one, index.kept), min(other, index.kept)))
    dense, values = -numbers(mask.numel()), numbers(index.kept)

    gathered = index.gather(numbers(mask.numel()), start, stop)
    for begin in range(0, index.kept, piece):
        index.scatter(dense, values[begin : begin + piece], begin)

    assert torch.equal(gathered, numbers(mask.numel())[mask][start:stop])
    assert torch.equal(dense[mask], values)
    assert torch.equal(dense[~mask], -numbers(mask.numel())[~mask])
    positions = index.positions()
    assert positions.dtype == torch.int64
    assert positions.tolist() == [at for at, kept in enumerate(mask.tolist()) if kept]
    assert index.kept == int(mask.sum())
    assert index.nbytes == index_bytes(mask.numel(), index.kept, kind)
    assert (index.nbytes == 0) == (
        bool(mask.all()) or (isinstance(index, Int32Index) and index.kept == 0)
    )


# -- masks against int32 --------------------------------------------------------------------


def assert_same(index: Index, reference: Int32Index, numel: int, start: int, stop: int) -> None:
    """Gather and scatter of one stretch, to the bit."""
    dense, values = numbers(numel), -numbers(stop - start)
    assert torch.equal(index.gather(dense, start, stop), reference.gather(dense, start, stop))
    ours, theirs = dense.clone(), dense.clone()
    index.scatter(ours, values, start)
    reference.scatter(theirs, values, start)
    assert torch.equal(ours, theirs)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(1, 3 * PIECE), st.sampled_from([0.002, 0.1, 0.7]), st.floats(0, 1), st.floats(0, 1)
)
def test_any_stretch_of_any_tensor_of_several_blocks(
    reader: None, numel: int, density: float, one: float, other: float
) -> None:
    mask = random_mask(numel, density)
    reference = Int32Index(mask)
    start, stop = sorted((int(one * reference.kept), int(other * reference.kept)))

    assert_same(MaskIndex(mask), reference, numel, start, stop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_machine_code_writes_nothing_beside_the_entries(dtype: torch.dtype, count: int) -> None:
    """Though it moves full words."""
    if not can_compile():
        pytest.skip("numba is not installed")
    index = MaskIndex(random_mask(5000, 0.7))
    around = torch.full((count + 200,), -1.0, dtype=dtype)
    room = around[100 : 100 + count]
    dense = numbers(5200).to(dtype)
    before = dense.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", lambda *_: room)
        index.gather(dense[100:5100], 7, 7 + count)
    index.scatter(dense[100:5100], -room, 7)

    positions = 100 + index.positions()[7 : 7 + count]
    assert torch.equal(room, before[positions])
    assert (around == -1).sum() == 200
    before[positions] *= -1
    assert torch.equal(dense, before)


TWO_TYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize("numel", [FEW + 1, 70_000])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("stored", "dense"), TWO_TYPES)
def test_one_pass_expands_what_rounding_and_scattering_write(
    stored: torch.dtype, dense: torch.dtype, density: float, numel: int
) -> None:
    mask = random_mask(numel, density)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    special = torch.tensor([math.nan, -math.nan, math.inf, 3.3895e38, 1e-42, -0.0])
    values[: len(special)], mask[: len(special)] = special, True
    values_K, index = values[mask].to(stored), MaskIndex(mask)
    around = torch.full((numel + 2,), 7.0, dtype=dense)

    done = index.expand(values_K, around[1:-1])
    if not done:
        assert not can_compile() or (stored, dense) == TWO_TYPES[-1]
        HOST.expand(index, values_K, around[1:-1])

    expected = torch.zeros(numel, dtype=dense)
    expected[mask] = round_to(values_K, dense) if stored == torch.float32 else values_K
    assert torch.equal(bits_of(around[1:-1]), bits_of(expected))
    assert around[0] == around[-1] == 7


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


# -- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100, 20_000])
def test_more_entries_than_int32_can_number_are_no_matter_to_a_mask(
    reader: None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = random_mask(70_000, 0.1)  # 7,000 are kept: beyond one of the limits
    reference = Int32Index(mask)
    monkeypatch.setattr(memory, "INT32_LIMIT", limit)
    index = MaskIndex(mask)

    assert index.nbytes == index_bytes(70_000, reference.kept, "mask")
    assert index.nbytes - 8 * 1094 == (8 if limit == 100 else 4) * (35 + 1)
    assert torch.equal(index.positions(), reference.positions())
    assert_same(index, reference, 70_000, 5, reference.kept)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_tensors_with_gaps_are_read_and_written_in_order(kind: IndexKind) -> None:
    mask = random_mask(60, 0.4).view(6, 10)
    layer = state_of({"w": mask}, StateFormat(torch.float32, torch.float32, (), kind))
    [tensor] = layer.tensors
    index = tensor.index
    transposed = numbers(60).view(10, 6).t()
    strided = torch.zeros(120)[::2]

    layer.accumulate(tensor, transposed)
    index.scatter(strided, layer.gradient_of(tensor), 0)

    assert not transposed.is_contiguous()
    assert torch.equal(layer.gradient_of(tensor), transposed[mask])
    assert torch.equal(strided.view(6, 10), transposed * mask)
    assert torch.equal(index.gather(strided, 0, index.kept), transposed[mask])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(9, 7), (3, PIECE + 5), (700, 640), (1, 70), (70, 1)])
def test_an_index_is_read_row_by_row(shape: tuple[int, int], kind: IndexKind) -> None:
    if not can_compile():
        pytest.skip("numba is not installed")
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[0, 0], mask[-1, -1] = False, False
    mask[1:-1] &= torch.arange(shape[0])[1:-1, None] % 3 > 0  # some rows keep nothing
    index = make_index(mask.view(-1), kind)
    assert not isinstance(index, FullIndex)
    assert isinstance(index, Int32Index | MaskIndex)

    columns, ends = index.csr(shape[1])

    assert columns.tolist() == mask.nonzero()[:, 1].tolist()
    assert ends.tolist() == mask.sum(1).cumsum(0).tolist()
