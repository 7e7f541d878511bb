"""All ranks agree on the loss, the norm and the finiteness of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from support.runs import on_ranks

from axsparse.data_parallel.step_consensus import LocalStats, StepConsensus, StepResult
from axsparse.runtime.communication import Transport
from axsparse.runtime.grid import Grid, RankCoords
from axsparse.samo.fixed_point import UnitFit
from axsparse.samo.optim.update import global_norm
from axsparse.samo.shards import BLOCK

T = TypeVar("T")
GRIDS = [Grid(1, 1), Grid(3, 1), Grid(1, 3), Grid(3, 2)]
NAMES = ["a", "b", "c", "d"]
KEPT = {"a": 10, "b": BLOCK + 1, "c": 0, "d": 2 * BLOCK}
PARTIALS = {
    "a": torch.tensor([1.0], dtype=torch.float64),
    "b": torch.tensor([2.0, 3.0], dtype=torch.float64),
    "c": torch.tensor([], dtype=torch.float64),
    "d": torch.tensor([4.0, 1e-30], dtype=torch.float64),
}


def on_every_rank(
    grid: Grid, body: Callable[[Transport, RankCoords], T], order: int | None = None
) -> list[T]:
    return on_ranks(grid.size, lambda one: body(one, grid.coords(one.rank)), order)


def reach(
    grid: Grid,
    loss_of: Callable[[RankCoords], float],
    *,
    spoilt: tuple[int, str, float] | None = None,
) -> list[StepResult]:
    """The verdict on every rank; `spoilt` replaces a rank's first partial of a tensor."""

    def body(transport: Transport, coords: RankCoords) -> StepResult:
        # Tensors are dealt out over the stages, and their blocks over the replicas.
        own = NAMES[coords.stage :: coords.grid.g_inter]
        consensus = StepConsensus(
            transport.world, transport.backoff, coords, NAMES, {name: KEPT[name] for name in own}
        )
        partials = {name: torch.zeros_like(PARTIALS[name]) for name in own}
        for name, blocks in partials.items():
            here = slice(coords.replica, None, coords.grid.g_data)
            blocks[here] = PARTIALS[name][here]
        if spoilt is not None and coords.rank == spoilt[0]:
            partials[spoilt[1]][0] = spoilt[2]
        return consensus.reach(LocalStats([loss_of(coords)], partials))

    return on_every_rank(grid, body)


def last_stage_loss(coords: RankCoords) -> float:
    """Only the last stage knows a loss; the values of other stages must not count."""
    return 0.5 + coords.replica if coords.is_last else 1e6


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_all_ranks_hear_the_summed_loss_and_the_norm_of_all_tensors(grid: Grid) -> None:
    expected = StepResult(
        loss=sum(0.5 + replica for replica in range(grid.g_data)),
        grad_norm=global_norm(torch.cat([PARTIALS[name] for name in NAMES])),
        finite=True,
    )

    assert reach(grid, last_stage_loss) == [expected] * grid.size


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_every_rank_and_is_named(value: float) -> None:
    for replica in (0, 1):
        for verdict in reach(
            Grid(3, 2),
            lambda coords: value if coords.replica == replica and coords.is_last else 1.0,  # noqa: B023
        ):
            assert not verdict.finite and not math.isfinite(verdict.loss)
            assert math.isfinite(verdict.grad_norm)
            assert (verdict.bad_loss, verdict.culprit) == (replica, None)
    for rank, name in ((0, "a"), (1, "b"), (0, "d")):
        square = value**2
        for verdict in reach(Grid(3, 2), last_stage_loss, spoilt=(rank, name, square)):
            assert not verdict.finite and not math.isfinite(verdict.grad_norm)
            assert verdict.loss == 2.0
            assert (verdict.bad_loss, verdict.culprit) == (None, name)


def test_the_first_bad_tensor_in_model_order_and_the_ranks_whose_own_were_bad_are_known() -> None:
    def body(transport: Transport, coords: RankCoords) -> tuple[str | None, tuple[int, ...]]:
        consensus = StepConsensus(transport.world, transport.backoff, coords, NAMES, KEPT)
        partials = {**PARTIALS, "d": PARTIALS["d"] * math.nan, "b": PARTIALS["b"] * math.inf}
        named = consensus.reach(LocalStats([1.0], partials)).culprit
        verdict = consensus.reach(LocalStats([1.0], {}, is_finite=coords.rank not in (2, 3)))
        assert verdict.finite, "what others made of it counts"
        return named, verdict.bad_ranks

    assert on_every_rank(Grid(1, 4), body) == [("b", (2, 3))] * 4


@pytest.mark.parametrize(("odd", "found"), [((), None), ((4,), 4), ((1,), 4), ((3, 5), 3)], ids=str)
def test_all_ranks_hear_who_has_other_weights_than_the_first_replica(
    odd: tuple[int, ...], found: int | None
) -> None:
    def body(transport: Transport, coords: RankCoords) -> int | None:
        consensus = StepConsensus(transport.world, transport.backoff, coords, NAMES, {})
        digest = (1 << 52) - 1 - 2 * coords.stage - (coords.rank in odd)
        verdict = consensus.reach(LocalStats([1.0], {}, digest=digest))
        assert found is not None or verdict.digest == (1 << 52) - 9, "the sum, which fp64 rounds"
        return verdict.drifted

    assert on_every_rank(Grid(3, 2), body) == [found] * 6


def test_all_ranks_hear_the_largest_fit_of_each_tensor() -> None:
    def body(transport: Transport, coords: RankCoords) -> StepResult:
        consensus = StepConsensus(transport.world, transport.backoff, coords, NAMES, KEPT)
        own = {
            0: {"a": UnitFit.COARSE, "b": UnitFit.GOOD},
            1: {"b": UnitFit.TOO_LARGE, "a": UnitFit.ROOMY},
        }
        return consensus.reach(
            LocalStats([1.0], {}, fits=own.get(coords.rank, {"d": UnitFit.COARSE}))
        )

    for verdict in on_every_rank(Grid(2, 2), body):
        assert verdict.finite
        assert verdict.fits == {"a": UnitFit.ROOMY, "b": UnitFit.TOO_LARGE, "d": UnitFit.COARSE}


def test_an_entry_that_is_not_finite_spoils_an_exact_sum_though_integers_do_not_tell() -> None:
    def body(transport: Transport, coords: RankCoords) -> StepResult:
        consensus = StepConsensus(transport.world, transport.backoff, coords, NAMES, KEPT)
        fits = {"b": UnitFit.NOT_FINITE} if coords.replica == 1 else {"a": UnitFit.TOO_LARGE}
        return consensus.reach(LocalStats([1.0], {}, fits=fits))

    for verdict in on_every_rank(Grid(1, 2), body):
        assert (verdict.finite, verdict.culprit) == (False, "b")
