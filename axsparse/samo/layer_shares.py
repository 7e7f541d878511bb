"""Which kept entries of a layer this replica answers for, and where they stand in flat buffers.

A layer has one flat buffer of each kind (gradient, master, each moment). The gradient holds the
kept entries of every tensor, those of tensor t at [offset, offset + kept). Master and moments hold
only the entries [held.start, held.stop), which belong to owned tensors: all of their entries, or
this replica's share of them where the optimizer state is sharded (`samo/shards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from axsparse.runtime.communication import Op
from axsparse.samo.shards import Replicas, share_bounds
from axsparse.samo.tensor_state import TensorState


class Shares:
    """Numbers the kept entries of one layer and deals them out to the replicas."""

    bounds: list[int]
    """Replica r answers for the owned entries [bounds[r], bounds[r + 1])."""
    own: range
    """The entries that this replica answers for: whole blocks."""
    held: range
    """The entries that are updated here: `own` if state is sharded, otherwise all."""

    def __init__(self, tensors: Sequence[TensorState], replicas: Replicas) -> None:
        self.replicas = replicas
        # Aliases come last, so that the part which replicas sum is contiguous.
        self.tensors = sorted(tensors, key=lambda tensor: tensor.alias_of is not None)
        self.owned = [tensor for tensor in self.tensors if tensor.alias_of is None]
        self.lay_out()

    def lay_out(self) -> None:
        """Set all offsets and bounds from what the tensors keep now."""
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

    def held_slice(self, tensor: TensorState, start: int, stop: int) -> slice:
        """Where a tensor's kept entries [start, stop) stand in the buffers of held entries."""
        shift = tensor.offset - self.held.start
        begin, end = shift + start, shift + stop
        assert begin == end or 0 <= begin < end <= len(self.held), "another replica holds these"
        return slice(begin, end)

    def gathered(
        self, tensor: TensorState, read: Callable[[int, int], Tensor], device: torch.device
    ) -> Tensor:
        """A tensor's fp32 values of all kept entries, `(kept,)`; may be what `read` returns.

        `read(start, stop)` returns the held ones. Where the state is sharded, all replicas call
        this together, and the result is on `device`.
        """
        own = tensor.entries_in(self.held)
        if not self.is_sharded:
            return read(own.start, own.stop)
        whole_K = torch.zeros(tensor.kept, device=device)
        whole_K[own.start : own.stop] = read(own.start, own.stop)
        bounds = [min(max(bound - tensor.offset, 0), tensor.kept) for bound in self.bounds]
        self.replicas.exchange(Op.ALL_GATHER, whole_K, bounds)
        return whole_K
