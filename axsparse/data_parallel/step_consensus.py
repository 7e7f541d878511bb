"""The agreement of all ranks on a step, in one small all-reduce: its loss, norm and finiteness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from axsparse.runtime.communication import Backoff, Collective, Op, wait
from axsparse.runtime.exchange import exact_sum
from axsparse.runtime.grid import RankCoords
from axsparse.samo.fixed_point import UnitFit
from axsparse.samo.masks import DIGESTS
from axsparse.samo.optim.update import global_norm
from axsparse.samo.shards import BLOCK

FITS = len(UnitFit) - 1
"""Slots of a tensor: one for each `UnitFit` of finite entries."""


@dataclass(frozen=True)
class Flags:
    """The flags that a rank sends with the agreement; in a verdict, whether any rank has set
    them."""

    stop: bool = False
    writing: bool = False
    """Whether the rank is still writing its part of a checkpoint."""


NOTHING = Flags()


@dataclass(frozen=True)
class LocalStats:
    """The local results of a step on a rank, before all ranks agree on it."""

    losses: Sequence[float]
    """The losses of this replica's microbatches, over the global number of targets. They count on
    the last stage only, and are added exactly and rounded once."""
    partials: Mapping[str, Tensor]
    notice: Flags = NOTHING
    is_finite: bool = True
    """Whether this rank's own gradients were finite, before they were summed over replicas."""
    digest: int = 0
    """Equal for equal weights; 0 on all ranks where weights are not compared."""
    fits: Mapping[str, UnitFit] = field(default_factory=dict)
    """Where sums are exact: the fit of the largest entry of each tensor with a gradient here."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on all ranks."""

    loss: float
    grad_norm: float
    finite: bool
    """Whether the loss and all gradients are finite; if not, no rank updates."""
    culprit: str | None = None
    """The first tensor, in model order, whose gradient is not finite."""
    bad_loss: int | None = None
    """The first replica whose loss is not finite."""
    bad_ranks: tuple[int, ...] = ()
    """Ranks whose own gradients were not finite, before they were summed over replicas."""
    notice: Flags = NOTHING
    drifted: int | None = None
    """The first rank with other weights than replica 0 of its stage, where they were compared."""
    digest: int | None = None
    """A hash of all weights before the update, where they were compared; the same in every layout
    in which the weights are."""
    fits: Mapping[str, UnitFit] = field(default_factory=dict)
    """How the largest entry of each tensor fits, of all that ranks have reported."""


class StepConsensus:
    """Reaches a verdict over all stages and replicas, once a step.

    The ranks add up an fp64 vector. It has two slots for the loss of each replica, and one for the
    part of the norm of each block of every tensor. Each slot has one owner and is zero elsewhere,
    so the sums are exact and the same in every layout, and numbers that are not finite stay so.
    Then follow, for each rank, a slot that is 1 if its own gradients are not finite and one for
    the digest of its weights; slots that count the ranks with each notice; and, for each tensor, a
    slot for each `UnitFit` that counts the ranks with it, NaN where an entry was not finite.
    """

    def __init__(
        self,
        world: Collective,
        backoff: Backoff,
        coords: RankCoords,
        names: Sequence[str],
        kept: Mapping[str, int],
    ) -> None:
        """All ranks construct this together.

        `names` has all tensors that count in the norm, in model order, the same on all ranks.
        `kept` has the number of kept entries of those that are on this rank.
        """
        self._world = world
        self._backoff = backoff
        self._coords = coords
        counts = torch.zeros(len(names), dtype=torch.float64)
        # Replica 0's, in which each tensor is on one rank only: shards are, and `kept` has a tensor
        # that is replicated on several tensor-parallel ranks on the first alone.
        if coords.replica == 0:
            for number, name in enumerate(names):
                counts[number] = kept.get(name, 0)
        wait(world.start(Op.ALL_REDUCE, counts), backoff)
        blocks = [-(-int(count) // BLOCK) for count in counts.tolist()]
        self._numbers = {name: number for number, name in enumerate(names)}
        ranks, notices = coords.grid.size, len(fields(Flags))
        sizes = [2 * coords.grid.g_data, *blocks, ranks, ranks, notices, len(names) * FITS]
        parts = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        self._losses, *slots, self._flags, self._digests, self._notices, self._fits = parts
        self._slots = dict(zip(names, slots, strict=True))

    def reach(self, report: LocalStats, loss_scale: float = 1.0) -> StepResult:
        """The verdict on a step; all ranks call this together.

        Gradients are `loss_scale` times too large.
        """
        vector = self._vector(report)
        wait(self._world.start(Op.ALL_REDUCE, vector), self._backoff)
        losses = vector[self._losses]
        digests, each = vector[self._digests].tolist(), self._coords.grid.parallelism
        odd = (rank for rank, own in enumerate(digests) if own != digests[rank % each])
        finite = bool(torch.isfinite(vector).all())
        return StepResult(
            loss=exact_sum(losses.tolist())[0],
            grad_norm=global_norm(vector[self._losses.stop : self._flags.start], loss_scale),
            finite=finite,
            culprit=None if finite else self._first_bad(vector),
            bad_loss=next((slot // 2 for slot in _where(~losses.isfinite())), None),
            bad_ranks=_where(vector[self._flags] > 0),
            notice=Flags(*(count > 0 for count in vector[self._notices].tolist())),
            drifted=next(odd, None),
            digest=sum(map(int, digests[:each])) % DIGESTS if any(digests) else None,
            fits=self._largest(vector[self._fits]),
        )

    def _vector(self, report: LocalStats) -> Tensor:
        coords = self._coords
        vector = torch.zeros(self._fits.stop, dtype=torch.float64)
        vector[self._notices] = torch.tensor(astuple(report.notice)).double()
        vector[self._flags][coords.rank] = not report.is_finite
        vector[self._digests][coords.rank] = report.digest
        if coords.is_last and coords.tp_rank == 0:
            slots = slice(2 * coords.replica, 2 * coords.replica + 2)
            vector[slots] = torch.tensor(exact_sum(report.losses), dtype=torch.float64)
        for name, partial in report.partials.items():
            vector[self._slots[name]] = partial
        fits = vector[self._fits]
        for name, fit in report.fits.items():
            first = FITS * self._numbers[name]
            if fit is UnitFit.NOT_FINITE:
                fits[first] = math.nan
            else:
                fits[first + fit] = 1
        return vector

    def _largest(self, counts: Tensor) -> dict[str, UnitFit]:
        if not counts.any():
            return {}
        numbers = torch.arange(1, FITS + 1)
        largest = ((counts.view(-1, FITS) > 0) * numbers).amax(1).tolist()
        return {
            name: UnitFit(fit - 1) for name, fit in zip(self._numbers, largest, strict=True) if fit
        }

    def _first_bad(self, vector: Tensor) -> str | None:
        fits = vector[self._fits].view(-1, FITS).isfinite().all(1)
        for number, (name, slot) in enumerate(self._slots.items()):
            if not (torch.isfinite(vector[slot]).all() and fits[number]):
                return name
        return None


def _where(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())
