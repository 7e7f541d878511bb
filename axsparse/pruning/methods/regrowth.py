"""Dynamic sparse training: between two steps, masks move at constant density.

Of every pruned tensor the kept entries that are smallest in magnitude are dropped, and
equally many others grow in their place: by chance (SET, Mocanu et al. 2018) or where the
gradient is largest (RigL, Evci et al. 2020). Our choices:
docs/decisions/019-dynamic-sparsity.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from axsparse.runtime.communication import Op
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.growth_candidates import Candidates, no_candidates, strongest
from axsparse.samo.layer_state import LayerState
from axsparse.samo.selection import by_magnitude, largest
from axsparse.samo.shards import Replicas
from axsparse.samo.tensor_state import TensorState
from axsparse.samo.ties import StageTie

CAPACITY = 1
"""Candidates that a tensor holds for every kept entry, while gradients choose."""


def moved_entries(kept: int, numel: int, fraction: float) -> int:
    """How many of a tensor's kept entries change places: round(fraction · kept), or as many
    as there are pruned ones."""
    return min(round(fraction * kept), numel - kept)


class Regrowth:
    """Moves the masks of one stage: `arm`, a step, and once that step has updated, `regrow`.

    All ranks call both alike. A step that was skipped changes no mask; its gradients are
    forgotten, and the next one's count.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        ties: Sequence[StageTie],
        owners: Mapping[str, str],
        replicas: Replicas,
        *,
        collector: GradientCollector | None,
        seed: int,
        capacity: int = CAPACITY,
    ) -> None:
        """`layers` in model order; `ties` in an order that all stages share.

        `owners` maps the global name of each second use of a weight to the first.
        `collector` gives the gradients that choose what grows; without one, chance does, by
        `seed`. With `capacity` candidates a kept entry, the choice is exact where one
        microbatch of one replica is all of a step, and a good guess elsewhere.
        """
        self._layers = layers
        self._ties = ties
        self._owners = owners
        self._replicas = replicas
        self._collector = collector
        self._seed = seed
        self._capacity = capacity
        self._fraction: float | None = None

    @property
    def is_armed(self) -> bool:
        """Whether `regrow` is due after the next step that updates."""
        return self._fraction is not None

    @property
    def fraction(self) -> float | None:
        """What it is armed with; None if it is not."""
        return self._fraction

    def arm(self, fraction: float) -> None:
        """Between steps: masks are to move, by this fraction of the kept entries of each tensor."""
        self._fraction = fraction
        if self._collector is not None:
            pruned = {tensor.name for _, tensor in self._pruned()}
            uses = [tensor for layer in self._layers for tensor in layer.tensors]
            self._collector.harvest(
                {
                    use.name: self._listed(use)
                    for use in uses
                    if (use.alias_of or use).name in pruned
                }
            )

    def regrow(self, step: int) -> dict[str, int]:
        """Between the armed step, which has updated, and the next: move the masks.

        `step` is the number of steps done; chance depends on it. Returns how many entries of
        each owned tensor moved; none of one without any gradient at its candidates.
        """
        assert self.is_armed, "nothing was armed"
        harvested = self._harvested()
        counts = {tensor.name: 0 for layer in self._layers for tensor in layer.owned}
        for layer, tensor in self._pruned():
            found = harvested.pop(tensor.name, None)
            # Counts stay, and with them every layout, also that of layers with an alias.
            counts[tensor.name] = self._move(layer, tensor, self._grown(tensor, found, step))
        self._fraction = None
        return counts

    # -- what grows -------------------------------------------------------------------

    def _grown(self, tensor: TensorState, found: Candidates | None, step: int) -> Tensor:
        """Flat positions that are to grow, the same on all replicas; none where there is
        nothing to go by."""
        numel, count = tensor.parameter.numel(), self._moved(tensor)
        if self._collector is None:
            owner = self._owners.get(tensor.name, tensor.name)
            generator = keyed_generator(self._seed, owner, "grow", step)
            drawn = torch.rand(numel, generator=generator).to(tensor.parameter.device)
            return strongest(drawn, (), tensor.index, count).positions
        own = found or no_candidates(numel, self._listed(tensor))
        lists = _from_all(own, self._replicas)
        nothing = torch.zeros(numel, device=tensor.parameter.device)
        chosen = strongest(nothing, lists, tensor.index, count)
        return chosen.positions if chosen.sums.any() else chosen.positions[:0]

    def _harvested(self) -> dict[str, Candidates]:
        """This replica's candidates by owned tensor, those of both uses of a tied weight joined."""
        if self._collector is None:
            return {}
        harvested = self._collector.harvested()
        pruned = {tensor.name for _, tensor in self._pruned()}
        for tie in self._ties:
            tensor = tie.uses[0].tensor
            if tensor.name not in pruned:
                continue
            numel, count = tensor.parameter.numel(), self._listed(tensor)
            empty = no_candidates(numel, count)
            lists = [harvested.pop(use.tensor.name, empty) for use in tie.uses]
            parts = iter(lists)
            if tie.pair is not None:
                parts = _from_all(lists[0], Replicas(tie.pair, self._replicas.backoff))
            nothing = torch.zeros(numel, device=tensor.parameter.device)
            harvested[tensor.name] = strongest(nothing, parts, tensor.index, count)
        return harvested

    # -- what goes --------------------------------------------------------------------

    def _move(self, layer: LayerState, tensor: TensorState, grown: Tensor) -> int:
        """Drop as many of the smallest kept entries as grow; of equal ones, higher positions."""
        count = grown.numel()
        if count:
            stays_K = largest(layer.master(tensor.name), tensor.kept - count, by_magnitude)
            mask_D = torch.zeros(tensor.parameter.numel(), dtype=torch.bool)
            mask_D[tensor.positions()[stays_K]] = True
            mask_D[grown.long()] = True
            layer.remask(tensor.name, mask_D)
        return count

    # -- counts -----------------------------------------------------------------------

    def _pruned(self) -> Iterator[tuple[LayerState, TensorState]]:
        """The owned tensors of which some entries move, in model order."""
        for layer in self._layers:
            for tensor in layer.owned:
                if self._moved(tensor):
                    yield layer, tensor

    def _moved(self, tensor: TensorState) -> int:
        assert self._fraction is not None, "nothing was armed"
        return moved_entries(tensor.kept, tensor.parameter.numel(), self._fraction)

    def _listed(self, tensor: TensorState) -> int:
        """Candidates that are held of a tensor."""
        return min(self._capacity * tensor.kept, tensor.parameter.numel() - tensor.kept)


def _from_all(own: Candidates, members: Replicas) -> Iterator[Candidates]:
    """Every member's list in rank order, one at a time, so that memory does not grow with them."""
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
