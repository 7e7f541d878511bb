"""Which replica answers for which kept entries of a layer, and how replicas exchange them.

A layer's kept entries are updated, and dealt out to replicas, in blocks. Every replica sums the
squares of its share for the norm; where the optimizer state is sharded (ZeRO stage 1, Rajbhandari
et al. 2020), it also holds master weights and moments of that share only. Shares end where blocks
end, so that no sum depends on the number of replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from axsparse.runtime.communication import Backoff, Collective, Op, wait

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 65_536
"""Kept entries of one tensor that are updated, and whose squares are summed, at a time. Part
of the numerics: the norm is a sum of one partial a block."""


def share_bounds(kept: Sequence[int], replicas: int) -> list[int]:
    """The bounds of the shares of a layer's kept entries: replica r has [b[r], b[r + 1]).

    `kept` has the kept entries of each tensor, in the order of the layer's flat buffers. The bounds
    are the ends of blocks nearest to equal shares, so a share may be empty in a small layer.
    """
    ends = [0]
    for begin, end in pairwise(accumulate(kept, initial=0)):
        ends += [*range(begin + BLOCK, end, BLOCK), end]
    bounds = [0]
    for replica in range(1, replicas):
        even = ends[-1] * replica / replicas
        after = bisect_left(ends, even)
        before = max(after - 1, 0)
        nearer = after if ends[after] - even < even - ends[before] else before
        bounds.append(ends[nearer])
    return [*bounds, ends[-1]]


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same layers as this one, each with all weights and gradients."""

    group: Collective | None = None
    """Joins the replicas, in rank order; None if this rank is alone."""
    backoff: Backoff | None = None
    """How to wait for an exchange; needed if there is a group."""
    shard: bool = False
    """Whether each replica holds the master weights and moments of its share only."""

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        """The number of replicas, this one included."""
        return 1 if self.group is None else self.group.size

    def exchange(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> None:
        """Carry out a collective operation in place and wait for it; all replicas call this."""
        if self.group is not None and self.group.size > 1 and buffer.numel():
            assert self.backoff is not None
            wait(self.group.start(op, buffer, bounds), self.backoff)

    def gathered(self, part: Tensor, bounds: Sequence[int]) -> Tensor:
        """A buffer of which replica r has the entries [bounds[r], bounds[r + 1]), here `part`; all
        replicas call this."""
        whole = part.new_zeros(bounds[-1])
        whole[bounds[self.rank] : bounds[self.rank + 1]] = part
        self.exchange(Op.ALL_GATHER, whole, bounds)
        return whole


ALONE = Replicas()
"""One replica, which holds everything."""
