"""Dynamic sparse training: between two steps, masks move at constant density.

In every pruned tensor the kept entries of smallest magnitude are dropped, and equally many
others grow in their place: random ones (SET, Mocanu et al. 2018) or those with the largest
gradient (RigL, Evci et al. 2020). docs/decisions/019-dynamic-sparsity.md has our choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import Change, MaskingState, MethodState, Moment, Read
from axsparse.runtime.communication import Op
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.layer_state import LayerState, StageTie
from axsparse.samo.selection import (
    Candidates,
    add_up,
    by_magnitude,
    largest,
    no_candidates,
    strongest,
)
from axsparse.samo.shards import Replicas
from axsparse.samo.tensor_state import TensorState, Whole

SQUARE = "exp_avg_sq"
"""The moment that steps are divided by the root of."""


class DynamicSparsity:
    """Exchanges kept entries every `interval` steps, after the step's update.

    If that step is skipped, they are exchanged after the next one that updates.
    """

    unfinished = None

    def __init__(
        self, live: LiveMasks, regrowth: Regrowth, *, interval: int, until_step: int, alpha: float
    ) -> None:
        """`alpha` is the fraction that is exchanged at first; it falls to 0 at `until_step`."""
        self._live = live
        self._regrowth = regrowth
        self._interval = interval
        self._until = until_step
        self._alpha = alpha
        self._armed_at = 0

    def before_step(self, now: Moment) -> Change | None:
        change = None
        if self._regrowth.fraction is not None and now.updates > self._armed_at:
            change = self._moved(now.step, self._regrowth.regrow(now.step))
        coming = now.step + 1
        if coming % self._interval == 0 and self._regrowth.fraction is None:
            fraction = drop_fraction(coming, alpha=self._alpha, end=self._until)
            if fraction > 0:
                self._regrowth.arm(fraction)
                self._armed_at = now.updates
        return change

    def state(self) -> MaskingState:
        """The candidates for growth are not saved: `before_step` has used the candidates of a step
        that updated, and the candidates of a skipped step are forgotten anyway."""
        return MaskingState(MethodState(armed=self._regrowth.fraction, armed_at=self._armed_at))

    def restore(self, standing: MethodState, read: Read) -> None:
        del read  # the masks come with the saved layers
        self._armed_at = standing.armed_at
        if standing.armed is not None:
            self._regrowth.arm(standing.armed)

    def _moved(self, step: int, counts: dict[str, int]) -> Change:
        live = self._live
        own = [counts[whole.name] for _, _, whole in live.counted()]
        moved = int(live.total(torch.tensor([sum(own)])))
        is_last = drop_fraction(step + self._interval, alpha=self._alpha, end=self._until) == 0
        return Change(
            f"{moved} kept entries moved", {"moved": moved, **live.figures()}, is_ticket=is_last
        )


@dataclass(frozen=True)
class RandomGrowth:
    """Random entries grow (SET)."""

    seed: int


@dataclass(frozen=True)
class GradientGrowth:
    """The entries with the largest gradient grow (RigL).

    Gradients are stored for kept entries only, so the collector lists the strongest pruned ones
    as candidates. The choice is exact where one microbatch of one replica is the whole step;
    otherwise it is an estimate, which more candidates improve.
    """

    collector: GradientCollector
    capacity: int = 1
    """Candidates that are listed for every kept entry of a tensor."""

    def listed(self, tensor: TensorState, moved: int) -> int:
        """How many candidates are listed for a tensor, or for a chunk of one of which `moved`
        entries move: these may all be in the chunk."""
        pruned = tensor.parameter.numel() - tensor.kept
        return min(max(self.capacity * tensor.kept, moved), pruned)


class Regrowth:
    """Moves the masks of one stage: call `arm`, run a step, and call `regrow` once it has updated.

    All ranks call both alike. A skipped step changes no mask: its gradients are forgotten, and
    those of the next step count.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        ties: Sequence[StageTie],
        owners: Mapping[str, str],
        replicas: Replicas,
        growth: RandomGrowth | GradientGrowth,
        *,
        warm: bool = False,
    ) -> None:
        """`layers` are in model order, `ties` in an order that all stages share.

        `owners` maps the global name of each second use of a weight to the name of the first.
        `warm` lets the second moment of what grows begin at its tensor's mean, not at 0.
        """
        self._layers = layers
        self._ties = ties
        self._owners = owners
        self._replicas = replicas
        self._growth = growth
        self._warm = warm
        self.fraction: float | None = None
        """The fraction given to `arm`; None if no `regrow` is due after the next update."""

    def arm(self, fraction: float) -> None:
        """Make `regrow` due, with this fraction of the kept entries; called between two steps."""
        self.fraction = fraction
        growth = self._growth
        if isinstance(growth, GradientGrowth):
            listed = self._listed(growth)
            uses = [tensor for layer in self._layers for tensor in layer.tensors]
            owners = {use.name: (use.alias_of or use).name for use in uses}
            growth.collector.harvest(
                {name: listed[owner] for name, owner in owners.items() if owner in listed}
            )

    def regrow(self, step: int) -> dict[str, int]:
        """Move the masks; called between the armed step, which has updated, and the next one.

        `step` is the number of steps done, which random growth depends on. Returns how many
        entries of each owned whole tensor moved; 0 for one whose candidates have no gradient.
        """
        assert self.fraction is not None, "nothing was armed"
        growth = self._growth
        candidates = {} if isinstance(growth, RandomGrowth) else self._stage_candidates(growth)
        counts = {name: 0 for layer in self._layers for name in layer.wholes}
        for layer, whole in self._moving():
            if isinstance(growth, RandomGrowth):
                grown = self._random(growth, layer, whole, step)
            else:
                grown = self._strongest(layer, whole, candidates)
            counts[whole.name] = _move(layer, whole, grown, warm=self._warm)
        # A tensor keeps as many entries as before, but each of its chunks may keep others.
        for layer in self._layers:
            if any(tensor.alias_of is not None for tensor in layer.tensors):
                layer.refit()
        self.fraction = None
        return counts

    # -- which entries grow: flat positions in the whole tensor, the same on all ranks --------

    def _random(self, growth: RandomGrowth, layer: LayerState, whole: Whole, step: int) -> Tensor:
        owner = self._owners.get(whole.name, whole.name)
        generator = keyed_generator(growth.seed, owner, "grow", step)
        drawn = torch.rand(whole.numel, generator=generator).to(layer.backend.device)
        return strongest(drawn, (), layer.index(whole.name), self._moved(whole)).positions

    def _strongest(
        self, layer: LayerState, whole: Whole, candidates: dict[str, Candidates]
    ) -> Tensor:
        """The strongest candidates of all replicas and members together; none if all their
        gradients are 0. Takes those of the tensor out of `candidates`."""
        sums = []
        for tensor in whole.parts:
            sums.append(torch.zeros(tensor.parameter.numel(), device=tensor.parameter.device))
            add_up(sums[-1], _from_all(candidates.pop(tensor.name), self._replicas))
        index, moved = layer.index(whole.name), self._moved(whole)
        chosen = strongest(layer.joined(whole, sums).view(-1), (), index, moved)
        return chosen.positions if chosen.sums.any() else chosen.positions[:0]

    def _stage_candidates(self, growth: GradientGrowth) -> dict[str, Candidates]:
        """This replica's candidates by owned tensor or chunk, those of both uses of a tied weight
        joined."""
        harvested, listed = growth.collector.harvested(), self._listed(growth)
        for tie in self._ties:
            tensor = tie.uses[0].tensor
            if tensor.name not in listed:
                continue
            numel, count = tensor.parameter.numel(), listed[tensor.name]
            empty = no_candidates(numel, count)
            lists = [harvested.pop(use.tensor.name, empty) for use in tie.uses]
            parts = iter(lists)
            if tie.pair is not None:
                parts = _from_all(lists[0], Replicas(tie.pair, self._replicas.backoff))
            nothing = torch.zeros(numel, device=tensor.parameter.device)
            harvested[tensor.name] = strongest(nothing, parts, tensor.index, count)
        for _, whole in self._moving():
            for tensor in whole.parts:
                empty = no_candidates(tensor.parameter.numel(), listed[tensor.name])
                harvested.setdefault(tensor.name, empty)
        return harvested

    # -- how many entries move ------------------------------------------------------------

    def _moving(self) -> Iterator[tuple[LayerState, Whole]]:
        """The owned tensors of which some entries move, in model order."""
        for layer in self._layers:
            for whole in layer.wholes.values():
                if self._moved(whole):
                    yield layer, whole

    def _moved(self, whole: Whole) -> int:
        assert self.fraction is not None, "nothing was armed"
        return moved_entries(whole.kept, whole.numel, self.fraction)

    def _listed(self, growth: GradientGrowth) -> dict[str, int]:
        """How many candidates are listed for each of the tensors and chunks that move."""
        return {
            tensor.name: growth.listed(tensor, self._moved(whole))
            for _, whole in self._moving()
            for tensor in whole.parts
        }


def moved_entries(kept: int, numel: int, fraction: float) -> int:
    """How many kept entries change places: round(fraction · kept), at most the pruned ones."""
    return min(round(fraction * kept), numel - kept)


def _move(layer: LayerState, whole: Whole, grown: Tensor, *, warm: bool) -> int:
    """Keep the entries at `grown` in place of as many of the smallest kept ones; among equal
    ones, those at higher positions go."""
    name, count = whole.name, grown.numel()
    if count:
        warm = warm and SQUARE in layer.optimizer_state.moments_K
        usual = float(layer.moment(name, SQUARE).double().mean()) if warm else 0.0
        stays_K = largest(layer.master(name), whole.kept - count, by_magnitude)
        kept = layer.index(name).positions().cpu()
        mask_D = torch.zeros(whole.numel, dtype=torch.bool)
        mask_D[kept[stays_K]] = True
        mask_D[grown.long()] = True
        layer.remask(name, mask_D)
        if warm:
            grown_D = torch.zeros(whole.numel, dtype=torch.bool)
            grown_D[grown.long()] = True
            layer.fill_moment(name, SQUARE, grown_D, usual)
    return count


def _from_all(own: Candidates, members: Replicas) -> Iterator[Candidates]:
    """Every member's candidates in rank order, one list at a time to bound the memory."""
    if members.size == 1:
        yield own
        return
    positions, sums = own.positions, own.sums
    for rank in range(members.size):
        buffer = torch.empty(own.nbytes, dtype=torch.uint8)
        if rank == members.rank:
            torch.cat([positions.view(torch.uint8), sums.view(torch.uint8)], out=buffer)
        bounds = [0] * (rank + 1) + [buffer.numel()] * (members.size - rank)
        members.exchange(Op.ALL_GATHER, buffer, bounds)
        yield Candidates(
            buffer[: positions.nbytes].view(positions.dtype),
            buffer[positions.nbytes :].view(sums.dtype),
        )


def drop_fraction(step: int, *, alpha: float, end: int) -> float:
    """The share of kept weights that is dropped at a step, while as many grow elsewhere.

    f(t) = alpha / 2 · (1 + cos(π · t / end)) before `end` (Evci et al. 2020, section 3), then 0
    """
    return 0.0 if step >= end else alpha / 2 * (1 + math.cos(math.pi * step / end))
