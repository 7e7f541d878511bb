"""SparseGPT of one matrix against the published formulas in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axsparse.pruning.input_statistics import BLOCK, SparseGptStatistics


def case(rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """A matrix, and microbatches of correlated inputs of which one is always zero."""
    generator = torch.Generator().manual_seed(columns)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = [torch.randn(50, columns, generator=generator) @ mixing for _ in range(4)]
    for x in inputs:
        x[:, 3] = 0
    return torch.randn(rows, columns, generator=generator), inputs


def published(
    weight: Tensor, inputs: list[Tensor], sparsity: float, pattern: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Frantar and Alistarh 2023, algorithm 1, with the running mean and threshold of their code."""
    columns = weight.shape[1]
    hessian, samples = torch.zeros(columns, columns), 0
    for x in inputs:
        hessian *= samples / (samples + len(x))
        samples += len(x)
        scaled = (2 / samples) ** 0.5 * x.t()
        hessian += scaled @ scaled.t()
    weight = weight.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    places = torch.arange(columns)
    hessian[places, places] += 0.01 * hessian.diagonal().mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    inverse = torch.linalg.cholesky(inverse, upper=True)
    gone = torch.zeros_like(weight, dtype=torch.bool)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        w, errors = weight[:, begin:end].clone(), torch.zeros(weight.shape[0], end - begin)
        inside = inverse[begin:end, begin:end]
        if pattern is None:
            score = w**2 / inside.diagonal() ** 2
            threshold = score.flatten().sort().values[int(score.numel() * sparsity)]
            gone[:, begin:end] = score <= threshold
        for i in range(end - begin):
            if pattern is not None and i % pattern[1] == 0:
                n, m = pattern
                score = w[:, i : i + m] ** 2 / inside.diagonal()[i : i + m] ** 2
                least = score.topk(m - n, dim=1, largest=False).indices
                gone[:, begin:end].scatter_(1, i + least, True)
            kept = w[:, i].clone()
            kept[gone[:, begin + i]] = 0
            error = (w[:, i] - kept) / inside[i, i]
            w[:, i:] -= error.unsqueeze(1) @ inside[i, i:].unsqueeze(0)
            errors[:, i] = error
            weight[:, begin + i] = kept
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    return ~gone, weight


@pytest.mark.parametrize("columns", [40, 300])
@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_masks_and_weights_are_those_of_the_published_code(
    columns: int, pattern: tuple[int, int] | None
) -> None:
    weight, inputs = case(12, columns)
    statistics = SparseGptStatistics(columns, torch.device("cpu"))
    for x in inputs:
        statistics.add(x)
    how_many = 0.6 if pattern is None else pattern

    mask, pruned = statistics.prune(weight, how_many)

    expected_mask, expected = published(weight, inputs, 0.6, pattern)
    # The column without inputs has zeros only: equal scores, of which the code removes all.
    alive = torch.arange(columns) != 3
    assert torch.equal(mask[:, alive], expected_mask[:, alive])
    torch.testing.assert_close(pruned[:, alive], expected[:, alive], rtol=0, atol=2e-4)
    assert int(mask.sum()) == SparseGptStatistics.kept(tuple(weight.shape), how_many)
    assert torch.equal(pruned * mask, pruned)


def test_groups_that_do_not_divide_a_block_stay_whole() -> None:
    weight, inputs = case(4, 300)
    statistics = SparseGptStatistics(300, torch.device("cpu"))
    for x in inputs:
        statistics.add(x)

    mask, _ = statistics.prune(weight, (2, 6))

    assert (mask.view(4, 50, 6).sum(2) == 2).all()
