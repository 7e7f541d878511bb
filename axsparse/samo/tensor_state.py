"""The trained tensors of a layer, and where their kept entries stand in the layer's flat buffers.

A layer has one flat buffer of each kind (gradient, master, each moment). The gradient holds the
kept entries of every tensor, tensor t's at [offset, offset + kept). Master and moments hold only
the entries [held.start, held.stop), which belong to owned tensors: all of their entries, or this
replica's share of them where the optimizer state is sharded (`samo/shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from axsparse.models.layer import TensorShard
from axsparse.samo.index.base import Index
from axsparse.samo.shards import BLOCK, Replicas, share_bounds


@dataclass(eq=False)
class TensorState:
    """One trained parameter: its dense weight and where its kept entries stand. An alias, the
    second use of a tied weight on the stage of the first, has a gradient only."""

    name: str
    """Global parameter name; a shard has the full parameter's name, "#", and its index."""
    parameter: nn.Parameter
    """Dense, in the training precision; zero at pruned positions. A weight that is sparse at rest
    has its values while its layer is expanded (`samo/expansion.py`)."""
    own_index: Index
    """The kept positions; an alias does not use it."""
    decays: bool
    """Whether weight decay applies."""
    alias_of: TensorState | None = None
    """The first use, if this is an alias."""
    offset: int = 0
    """Number of the first kept entry in the layer's flat buffers; set by `Shares.lay_out`."""
    accumulated: bool = False
    """Whether this step's gradient has been written at least once."""
    unit: float = 1.0
    """The value of 1 in sums of integers (`samo/fixed_point.py`); a power of two."""
    most: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The largest absolute value that was added to sums of integers in this step, fp32 `(1,)`;
    empty where sums are not of integers."""
    shard: TensorShard | None = None
    """The place in the full tensor, if this is a shard of one."""
    shards_kept: int = 0
    """Kept entries of all shards, if this is one."""
    version: int = 0
    """Torch's count of writes to the dense weight, as of the last look at them
    (`LayerState.adopt_writes`)."""
    begun: int = 0
    """Updates of the run before this tensor's first one, where it was thawed at a resume."""
    expanded_at: range | None = None
    """The entries of the layer's `Expansion` in which the weight is dense while its layer computes;
    None for a weight that is dense at rest."""
    kept_weight: Tensor | None = None
    """The kept weights in the training precision, of a weight that is sparse at rest; None where
    they are rounded from masters or have to be gathered, and for an alias. While a layer lends its
    gradient's memory to its weights, all of its tensors have a view there."""

    @property
    def index(self) -> Index:
        """The kept positions; an alias has its owner's."""
        return self.alias_of.index if self.alias_of is not None else self.own_index

    @property
    def kept(self) -> int:
        return self.index.kept

    def positions(self) -> Tensor:
        """Flat positions of the kept entries on the host, int64, ascending."""
        return self.index.positions().cpu()

    @property
    def weight_D(self) -> Tensor:
        """The weight as a flat view, if it is dense at rest."""
        assert self.expanded_at is None, f"{self.name} is sparse at rest"
        return self.parameter.detach().view(-1)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The bounds of its blocks of kept entries, in order."""
        for start in range(0, self.kept, BLOCK):
            yield start, min(start + BLOCK, self.kept)

    def entries_in(self, part: range, start: int = 0, stop: int | None = None) -> range:
        """Which kept entries [start, stop), by default all, are in a part of the flat buffers."""
        stop = self.kept if stop is None else stop
        first = min(max(part.start - self.offset, start), stop)
        return range(first, max(first, min(part.stop - self.offset, stop)))

    @property
    def full_name(self) -> str:
        return self.name if self.shard is None else self.name.rpartition("#")[0]

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape) if self.shard is None else self.shard.full_shape

    @property
    def full_numel(self) -> int:
        return torch.Size(self.full_shape).numel()

    @property
    def full_kept(self) -> int:
        """Kept entries of the full parameter, on all ranks."""
        return self.kept if self.shard is None else self.shards_kept

    def of_full(self, values: Tensor) -> Tensor:
        """The values of this tensor, flat, from the values of the full one."""
        return (values if self.shard is None else self.shard.take(values)).view(-1)


class Shares:
    """Numbers the kept entries of one layer and deals them out to the replicas."""

    bounds: list[int]
    """Replica r answers for the owned entries [bounds[r], bounds[r + 1])."""
    own: range
    """The entries that this replica answers for: entire blocks."""
    held: range
    """The entries that are updated here: `own` if state is sharded, otherwise all."""

    def __init__(self, tensors: Sequence[TensorState], replicas: Replicas) -> None:
        self.replicas = replicas
        # Aliases come last, so that the part which replicas sum is contiguous.
        self.tensors = sorted(tensors, key=lambda tensor: tensor.alias_of is not None)
        self.owned = [tensor for tensor in self.tensors if tensor.alias_of is None]
        self.lay_out()

    def lay_out(self) -> None:
        """Set all offsets and bounds from the present kept entries of the tensors."""
        total = 0
        for tensor in self.tensors:
            tensor.offset = total
            total += tensor.kept
        self.total = total
        """Kept entries of all tensors, aliases included."""
        self.bounds = share_bounds([tensor.kept for tensor in self.owned], self.replicas.size)
        rank = self.replicas.rank
        self.own = range(self.bounds[rank], self.bounds[rank + 1])
        self.held = self.own if self.is_sharded else range(self.bounds[-1])

    @property
    def is_sharded(self) -> bool:
        """Whether master and moments are this replica's share only."""
        return self.replicas.shard and self.replicas.size > 1

    def blocks(self, tensor: TensorState, part: range) -> Iterator[tuple[int, int]]:
        """The bounds within the tensor of its blocks that are in a part of the flat buffers."""
        for start, stop in tensor.blocks():
            if part.start <= tensor.offset + start and tensor.offset + stop <= part.stop:
                yield start, stop

    def shard_slice(self, tensor: TensorState, start: int, stop: int) -> slice:
        """The place of a tensor's kept entries [start, stop) in the buffers of held entries."""
        shift = tensor.offset - self.held.start
        begin, end = shift + start, shift + stop
        assert begin == end or 0 <= begin < end <= len(self.held), "another replica holds these"
        return slice(begin, end)

    def gathered(self, tensor: TensorState, held_K: Tensor) -> Tensor:
        """A tensor's values of all kept entries, `(kept,)`, from those that are held here, which
        are the result where the state is not sharded; else all replicas call this together."""
        if not self.is_sharded:
            return held_K
        bounds = [min(max(bound - tensor.offset, 0), tensor.kept) for bound in self.bounds]
        return self.replicas.gathered(held_K, bounds)


class Relocation:
    """How values move in a layer's flat buffers when the mask of one of its tensors shrinks.

    Made before `Shares.lay_out` lays the shares out anew; values move after it.
    """

    def __init__(self, mask_D: Tensor, changed: TensorState, shares: Shares) -> None:
        """`mask_D` is the flat mask of `changed`, on the layer's device."""
        self._stays_K = mask_D[changed.index.positions()]
        stay = int(self._stays_K.count_nonzero())
        assert stay == int(mask_D.count_nonzero()), "masks only shrink"
        self._begin, self._end = changed.offset, changed.offset + changed.kept
        self._shares, self._bounds = shares, shares.bounds

    def staying(self, before: Tensor) -> Tensor:
        """The values that stay, of all kept entries that the changed tensor had; a copy."""
        return before[self._stays_K]

    def all_owned(self, held: Tensor) -> Tensor:
        """A buffer of all owned entries as they were, from this replica's held ones.

        All replicas call this together where the state is sharded.
        """
        if not self._shares.is_sharded:
            return held
        return self._shares.replicas.gathered(held, self._bounds)

    def moved(self, owned: Tensor) -> Tensor:
        """The entries that stay, of a flat buffer that begins with all owned ones as they were."""
        changed = self.staying(owned[self._begin : self._end])
        return torch.cat((owned[: self._begin], changed, owned[self._end : self._bounds[-1]]))
