"""Products with the kept entries of a matrix, beside torch's with the dense matrix in fp64."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axsparse.samo.host import kept_encodings, kept_matrix
from axsparse.samo.host.compiled_loops import Array, has_bf16_loops
from axsparse.samo.host.kept_encodings import MOST_TOKENS, SPARE
from axsparse.samo.host.kept_matrix import KeptMatrix, has_loops

SHAPES = [(5, 7), (1, 1), (64, 64), (577, 200), (16, 3000), (4, 0)]
"""Rows and columns; of 3,000 columns some distances at 99.9 % are above 255."""


@pytest.fixture(autouse=True, params=["AVX2", "bf16"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The encoding of matrices with few kept entries, for loops of each kind."""
    by_bf16 = request.param == "bf16"
    if by_bf16 and not has_bf16_loops():
        pytest.skip("needs a processor with AVX512_BF16 and AVX512_VBMI2, and numba")
    if not has_loops():
        pytest.skip("needs a processor with AVX2, and numba")
    monkeypatch.setattr(kept_matrix, "has_bf16_loops", lambda: by_bf16)
    kept_matrix.expanded_from.cache_clear()
    return "slices" if by_bf16 else "list"


def pruned(rows: int, columns: int, sparsity: float) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    dense = torch.randn(rows, columns, generator=generator).bfloat16()
    return dense.masked_fill_(torch.rand(rows, columns, generator=generator) < sparsity, 0)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_as_near_to_fp64_as_torchs(shape: tuple[int, int], sparsity: float) -> None:
    dense = pruned(*shape, sparsity)
    matrix = KeptMatrix(dense)
    assert torch.equal(matrix.dense(), dense)
    for tokens in (1, 2, 4, 7, MOST_TOKENS, MOST_TOKENS + 1):
        x, bias = torch.randn(tokens, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
        exact = x.double() @ dense.double().T + bias.double()
        ours, theirs = matrix.multiply(x, bias), F.linear(x, dense, bias)
        assert ours.dtype == torch.bfloat16
        assert ours.shape == theirs.shape
        error, allowed = (one.double() - exact for one in (ours, theirs))
        assert error.norm() <= allowed.norm() * 1.01 + 1e-9


def test_any_shape_and_type_of_inputs() -> None:
    dense = pruned(48, 96, 0.6)
    matrix = KeptMatrix(dense)
    for shape in [(96,), (1, 1, 96), (2, 3, 96), (0, 96)]:
        x = torch.randn(shape)
        torch.testing.assert_close(matrix.multiply(x), F.linear(x, dense.float()))
    bias = torch.randn(48, requires_grad=True)
    half = torch.randn(2, 96).bfloat16()
    wanted = F.linear(half.float(), dense.float(), bias).bfloat16()
    torch.testing.assert_close(matrix.multiply(half, bias), wanted)
    matrix.multiply(half.float(), bias).sum().backward()
    assert torch.equal(bias.grad if bias.grad is not None else half, torch.full((48,), 2.0))
    for kind in (torch.bfloat16, torch.float32):
        nan = matrix.multiply(torch.full((1, 96), torch.nan, dtype=kind))
        assert bool(nan.isnan().all())
    apart = torch.randn(96, 2).T
    torch.testing.assert_close(matrix.multiply(apart), F.linear(apart, dense.float()))


@pytest.mark.parametrize(
    ("sparsity", "encoding", "share"),
    [(0.5, "mask", 0.57), (0.7, "mask", 0.37), (0.9, "few", 0.17), (0.98, "few", 0.05)],
)
def test_bytes(sparsity: float, encoding: str, share: float, few: str) -> None:
    matrix = KeptMatrix(pruned(512, 1024, sparsity))
    assert matrix.encoding.name == (few if encoding == "few" else encoding)
    assert matrix.nbytes <= share * 2 * 512 * 1024


def test_fp32_inputs_are_not_rounded() -> None:
    """A sum whose result is in the lower bits of the inputs, and inputs of any size."""
    for sparsity in (0.5, 0.95):
        dense = torch.ones(33, 200).bfloat16()
        dense[:, torch.rand(200, generator=torch.Generator().manual_seed(1)) < sparsity] = 0
        kept = dense[0].nonzero()[:2, 0]
        x = torch.zeros(1, 200)
        x[0, kept[0]], x[0, kept[1]] = 1 + 2**-23, -1
        assert KeptMatrix(dense).multiply(x).unique().item() == 2**-23
        x[0, kept[0]], x[0, kept[1]] = torch.finfo(torch.float32).max, 0
        assert KeptMatrix(dense).multiply(x).unique().item() == torch.finfo(torch.float32).max


@pytest.mark.parametrize("columns", [2, 64])
def test_sums_are_rounded_to_the_even_one_of_two(columns: int) -> None:
    dense = torch.zeros(1, columns).bfloat16()
    dense[0, :2] = 1
    x = torch.zeros(2, columns).bfloat16()
    x[0, :2], x[1, :2] = torch.tensor([1, 2**-8]), torch.tensor([1 + 2**-7, 2**-8])
    assert KeptMatrix(dense).multiply(x).flatten().tolist() == [1, 1 + 2**-6]


def test_inputs_in_fp32_that_are_infinite_or_no_numbers() -> None:
    matrix = KeptMatrix(torch.ones(3, 70).bfloat16())
    x = torch.zeros(2, 70)
    x[0, 5], x[1].view(torch.int32)[5] = torch.inf, 0x7F800001
    assert matrix.multiply(x)[0].unique().item() == torch.inf
    assert bool(matrix.multiply(x)[1].isnan().all())


def test_rows_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a slice are sorted by their kept entries, and some have none; slices are made four
    at a time."""
    monkeypatch.setattr(kept_encodings, "AT_ONCE", 4)
    dense = pruned(150, 700, 0.9)
    dense[::3] = 0
    dense[1::7] *= torch.rand(700) < 0.05
    matrix = KeptMatrix(dense)
    assert torch.equal(matrix.dense(), dense)
    x = torch.randn(6, 700)
    torch.testing.assert_close(matrix.multiply(x), F.linear(x, dense.float()))


@pytest.mark.parametrize("sparsity", [0.5, 0.95])
def test_loops_read_nothing_behind_what_a_matrix_holds(sparsity: float) -> None:
    """Each array ends where memory ends that may be read: a loop that reads on ends the process."""
    dense = pruned(40, 200, sparsity)
    matrix = KeptMatrix(dense)
    encoding = matrix.encoding
    held = [before_unreadable_memory(array) for array in (encoding._padded, *encoding.arrays)]
    encoding._about[: len(held)] = [array.ctypes.data for array, _ in held]
    encoding._about[0] += SPARE * encoding._padded.itemsize
    for tokens in (1, 5):
        x = torch.randn(tokens, 200).bfloat16()
        torch.testing.assert_close(matrix.multiply(x), F.linear(x, dense), rtol=2e-2, atol=1e-1)


def before_unreadable_memory(array: Array) -> tuple[Array, mmap.mmap]:
    """A copy of an array right before a page that nobody may read, and the memory of both."""
    end = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    begin = end - array.nbytes
    copy = np.frombuffer(memory, array.dtype, array.size, begin)
    copy[:] = array.reshape(-1)
    last = ctypes.c_void_p(copy.ctypes.data + array.nbytes)
    assert ctypes.CDLL(None).mprotect(last, mmap.PAGESIZE, 0) == 0
    return copy, memory


def test_threads_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrix, "SHARED_ENTRIES", 1)
    before = torch.get_num_threads()
    try:
        for sparsity in (0.5, 0.95):
            dense = pruned(101, 130, sparsity)
            x = torch.randn(3, 130)
            torch.set_num_threads(1)
            alone = KeptMatrix(dense).multiply(x)
            torch.set_num_threads(3)
            assert torch.equal(KeptMatrix(dense).multiply(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dense_from", [39, 40])
def test_many_tokens(dense_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrix, "expanded_from", lambda _: dense_from)
    dense, x = pruned(20, 30, 0.5), torch.randn(3, 13, 30)
    bias = torch.randn(20)
    wanted = F.linear(x, dense.float(), bias)
    torch.testing.assert_close(KeptMatrix(dense).multiply(x, bias), wanted)


def test_without_loops_the_matrix_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrix, "has_loops", lambda: False)
    dense = pruned(20, 30, 0.5)
    x = torch.randn(1, 30).bfloat16()
    assert torch.equal(KeptMatrix(dense).multiply(x), F.linear(x, dense))
