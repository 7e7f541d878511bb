"""Statistics of inputs: products with a weight on either side; SparseGPT as published."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.methods import published
from support.runs import default_dtype
from torch import Tensor

from axsparse.pruning.input_statistics import (
    ProductStatistics,
    SparseGptStatistics,
    WandaStatistics,
    WatchedProducts,
)
from axsparse.pruning.targets import COUNTS
from axsparse.runtime.errors import ConfigError


def case(rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """A matrix, and microbatches of correlated inputs of which one is always zero."""
    generator = torch.Generator().manual_seed(columns)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = [torch.randn(50, columns, generator=generator) @ mixing for _ in range(4)]
    for x in inputs:
        x[:, 3] = 0
    return torch.randn(rows, columns, generator=generator), inputs


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
    kept = weight.numel() // 2 if pattern else COUNTS["sparsegpt"](12, columns, 0.6)
    assert int(mask.sum()) == kept
    assert torch.equal(pruned * mask, pruned)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", [WandaStatistics, SparseGptStatistics])
def test_pruned_weights_do_not_depend_on_torchs_default_type(
    method: type[WandaStatistics | SparseGptStatistics], dtype: torch.dtype
) -> None:
    weight, inputs = case(12, 300)

    def pruned() -> Tensor:
        statistics = method(300, torch.device("cpu"))
        for x in inputs:
            statistics.add(x)
        return statistics.prune(weight, 0.6)[1]

    expected = pruned()

    with default_dtype(dtype):
        assert torch.equal(pruned(), expected)


def test_groups_that_do_not_divide_a_block_stay_whole() -> None:
    weight, inputs = case(4, 300)
    statistics = SparseGptStatistics(300, torch.device("cpu"))
    for x in inputs:
        statistics.add(x)

    mask, _ = statistics.prune(weight, (2, 6))

    assert (mask.view(4, 50, 6).sum(2) == 2).all()


@pytest.mark.parametrize(
    "multiply",
    [
        lambda weight, x: x @ weight.T,
        lambda weight, x: weight @ x.T,
        lambda weight, x: [weight @ row for row in x],
        lambda weight, x: torch.addmm(torch.zeros(3, 5), weight, x.T),
    ],
    ids=["mm", "weight first", "mv", "addmm"],
)
def test_a_product_shows_its_inputs_on_either_side_of_the_weight(
    multiply: Callable[[Tensor, Tensor], object],
) -> None:
    weight, x = torch.randn(3, 4), torch.randn(5, 4)
    gathered = ProductStatistics(WandaStatistics, "weight", weight, 1)

    with WatchedProducts([gathered]):
        multiply(weight, x)

    assert not gathered.unmet
    torch.testing.assert_close(gathered.norms, x.norm(dim=0))


@pytest.mark.parametrize("product", ["bmm", "_grouped_mm"])
def test_a_product_with_a_stack_gives_each_matrix_its_own_tokens(product: str) -> None:
    multiply = getattr(torch, product, None) or pytest.skip(f"this torch has no {product}")
    weight, x = torch.randn(2, 4, 8), torch.randn(2, 5, 4)
    gathered = ProductStatistics(WandaStatistics, "experts", weight, 1)

    with WatchedProducts([gathered]):
        multiply(x, weight)

    for scores, matrix, tokens in zip(gathered.scores(weight), weight, x, strict=True):
        torch.testing.assert_close(scores, matrix.t().abs() * tokens.norm(dim=0))


@pytest.mark.parametrize(
    ("name", "shape", "ending"),
    [
        ("layers.3.experts.up", (2, 6, 4), r" \(layers\.\*\.experts\.\* for all of its kind\)"),
        ("layers.3.up.weight", (6, 4), r" \(layers\.\*\.up\.weight for all of its kind\)"),
        ("up.weight", (6, 4), ""),
    ],
)
def test_a_matrix_that_is_multiplied_in_parts_is_named_with_all_of_its_kind(
    name: str, shape: tuple[int, ...], ending: str
) -> None:
    weight = torch.zeros(shape)
    half = weight.view(-1, *shape[-2:])[0][:3]

    with pytest.raises(ConfigError, match=f"{name} is multiplied in parts; .*exclude{ending}$"):
        ProductStatistics(WandaStatistics, name, weight, weight.dim() - 1).add(
            torch.zeros(5, 4), half.t(), None
        )
