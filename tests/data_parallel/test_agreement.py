"""All ranks agree on the loss, the norm and the finiteness of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from axsparse.data_parallel.agreement import Agreement, Report, Verdict
from axsparse.runtime.communication import Transport
from axsparse.runtime.exchange import gather_texts, sum_by_owner
from axsparse.runtime.grid import Grid, Place
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.fixed_point import Fit
from axsparse.samo.optim.gradient_norm import global_norm
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
    grid: Grid, body: Callable[[Transport, Place], T], order: int | None = None
) -> list[T]:
    world: LocalWorld[T] = LocalWorld(grid.size, seed=order)
    return world.run(lambda rank: body(LocalTransport(world, rank), grid.place(rank)))


def names_of(place: Place) -> list[str]:
    """Tensors are dealt out over the stages."""
    return [name for number, name in enumerate(NAMES) if number % place.grid.g_inter == place.stage]


def share(partials: Tensor, place: Place) -> Tensor:
    """Blocks are dealt out over the replicas; each has zeros for the blocks of others."""
    owners = torch.arange(len(partials)) % place.grid.g_data
    return torch.where(owners == place.replica, partials, 0.0)


def reach(
    grid: Grid,
    loss_of: Callable[[Place], float],
    *,
    spoilt: tuple[int, str, float] | None = None,
) -> list[Verdict]:
    """The verdict on every rank; `spoilt` replaces a rank's first partial of a tensor."""

    def body(transport: Transport, place: Place) -> Verdict:
        own = names_of(place)
        agreement = Agreement(
            transport.world, transport.backoff, place, NAMES, {name: KEPT[name] for name in own}
        )
        partials = {name: share(PARTIALS[name], place) for name in own}
        if spoilt is not None and place.rank == spoilt[0]:
            partials[spoilt[1]][0] = spoilt[2]
        return agreement.reach(Report([loss_of(place)], partials))

    return on_every_rank(grid, body)


def last_stage_loss(place: Place) -> float:
    """Only the last stage knows a loss; the values of other stages must not count."""
    return 0.5 + place.replica if place.is_last else 1e6


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_all_ranks_hear_the_summed_loss_and_the_norm_of_all_tensors(grid: Grid) -> None:
    expected = Verdict(
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
            lambda place: value if place.replica == replica and place.is_last else 1.0,  # noqa: B023
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
    def body(transport: Transport, place: Place) -> tuple[str | None, tuple[int, ...]]:
        agreement = Agreement(transport.world, transport.backoff, place, NAMES, KEPT)
        partials = {**PARTIALS, "d": PARTIALS["d"] * math.nan, "b": PARTIALS["b"] * math.inf}
        named = agreement.reach(Report([1.0], partials)).culprit
        verdict = agreement.reach(Report([1.0], {}, is_finite=place.rank not in (2, 3)))
        assert verdict.finite, "what others made of it counts"
        return named, verdict.bad_ranks

    assert on_every_rank(Grid(1, 4), body) == [("b", (2, 3))] * 4


def test_the_norm_is_that_of_unscaled_gradients() -> None:
    def body(transport: Transport, place: Place) -> Verdict:
        agreement = Agreement(transport.world, transport.backoff, place, NAMES, KEPT)
        partials = {name: v * 2.0**40 for name, v in PARTIALS.items()}
        return agreement.reach(Report([1.0], partials), 2.0**20)

    (verdict,) = on_every_rank(Grid(1, 1), body)

    assert verdict.grad_norm == global_norm(torch.cat([PARTIALS[name] for name in NAMES]))
    assert verdict.loss == 1.0


@pytest.mark.parametrize("order", [None, 1, 2])
def test_values_are_gathered_in_rank_order_and_exact(order: int | None) -> None:
    def body(transport: Transport, place: Place) -> list[list[float]]:
        own = [2.0**52 + place.rank, 0.1 * place.rank]
        return sum_by_owner(transport.world, transport.backoff, own)

    expected = [[2.0**52 + rank, 0.1 * rank] for rank in range(4)]
    assert on_every_rank(Grid(4, 1), body, order) == [expected] * 4


@pytest.mark.parametrize(
    "texts",
    [["", ""], ["", "ß→𝄞", "", "a"], ["a" * 70_000, "", "φ"]],
    ids=["empty", "short", "long"],
)
def test_texts_of_any_length_are_gathered_in_rank_order(texts: list[str]) -> None:
    def body(transport: Transport, place: Place) -> list[str]:
        return gather_texts(transport.world, transport.backoff, texts[place.rank])

    assert on_every_rank(Grid(len(texts), 1), body) == [texts] * len(texts)


@pytest.mark.parametrize(("odd", "found"), [((), None), ((4,), 4), ((1,), 4), ((3, 5), 3)], ids=str)
def test_all_ranks_hear_who_has_other_weights_than_the_first_replica(
    odd: tuple[int, ...], found: int | None
) -> None:
    def body(transport: Transport, place: Place) -> int | None:
        agreement = Agreement(transport.world, transport.backoff, place, NAMES, {})
        digest = (1 << 52) - 1 - 2 * place.stage - (place.rank in odd)
        verdict = agreement.reach(Report([1.0], {}, digest=digest))
        assert found is not None or verdict.digest == (1 << 52) - 9, "the sum, which fp64 rounds"
        return verdict.drifted

    assert on_every_rank(Grid(3, 2), body) == [found] * 6


def test_all_ranks_hear_the_largest_fit_of_each_tensor() -> None:
    def body(transport: Transport, place: Place) -> Verdict:
        agreement = Agreement(transport.world, transport.backoff, place, NAMES, KEPT)
        own = {0: {"a": Fit.COARSE, "b": Fit.GOOD}, 1: {"b": Fit.TOO_LARGE, "a": Fit.ROOMY}}
        return agreement.reach(Report([1.0], {}, fits=own.get(place.rank, {"d": Fit.COARSE})))

    for verdict in on_every_rank(Grid(2, 2), body):
        assert verdict.finite
        assert verdict.fits == {"a": Fit.ROOMY, "b": Fit.TOO_LARGE, "d": Fit.COARSE}


def test_an_entry_that_is_not_finite_spoils_an_exact_sum_though_integers_do_not_tell() -> None:
    def body(transport: Transport, place: Place) -> Verdict:
        agreement = Agreement(transport.world, transport.backoff, place, NAMES, KEPT)
        fits = {"b": Fit.NOT_FINITE} if place.replica == 1 else {"a": Fit.TOO_LARGE}
        return agreement.reach(Report([1.0], {}, fits=fits))

    for verdict in on_every_rank(Grid(1, 2), body):
        assert (verdict.finite, verdict.culprit) == (False, "b")


def test_losses_are_added_exactly_whoever_has_them() -> None:
    losses = [1.0, 2.0**-60, 2.0**60, -(2.0**60), 3.0, 2.0**-50]

    def body(transport: Transport, place: Place) -> float:
        agreement = Agreement(transport.world, transport.backoff, place, [], {})
        own = losses[place.replica :: place.grid.g_data]
        return agreement.reach(Report(own, {})).loss

    for replicas in (1, 2, 3):
        found = on_every_rank(Grid(1, replicas), body)
        assert found == [math.fsum(losses)] * replicas
