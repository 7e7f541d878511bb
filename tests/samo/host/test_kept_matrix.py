"""Products with the kept entries of a matrix, beside torch's with the dense matrix in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axsparse.samo.host import kept_matrix
from axsparse.samo.host.kept_matrix import MOST_TOKENS, KeptMatrix

SHAPES = [(5, 7), (1, 1), (64, 64), (577, 200), (16, 3000), (4, 0)]
"""Rows and columns; of 3,000 columns some distances at 99.9 % are above 255."""


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
    nan = matrix.multiply(torch.full((1, 96), torch.nan).bfloat16())
    assert bool(nan.isnan().all())
    apart = torch.randn(96, 2).T
    torch.testing.assert_close(matrix.multiply(apart), F.linear(apart, dense.float()))


@pytest.mark.parametrize(
    ("sparsity", "encoding", "share"),
    [(0.5, "mask", 0.57), (0.7, "mask", 0.37), (0.9, "list", 0.17), (0.98, "list", 0.05)],
)
def test_bytes(sparsity: float, encoding: str, share: float) -> None:
    matrix = KeptMatrix(pruned(512, 1024, sparsity))
    assert matrix.encoding == encoding
    assert matrix.nbytes <= share * 2 * 512 * 1024


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


@pytest.mark.parametrize("is_quick", [False, True])
def test_many_tokens(is_quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrix, "multiplies_dense", lambda _: is_quick)
    dense, x = pruned(20, 30, 0.5), torch.randn(3, 13, 30)
    bias = torch.randn(20)
    wanted = F.linear(x, dense.float(), bias)
    torch.testing.assert_close(KeptMatrix(dense).multiply(x, bias), wanted)


def test_without_loops_the_matrix_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_matrix, "has_loops", lambda: False)
    dense = pruned(20, 30, 0.5)
    x = torch.randn(1, 30).bfloat16()
    assert torch.equal(KeptMatrix(dense).multiply(x), F.linear(x, dense))
