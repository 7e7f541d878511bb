"""One trained tensor: its dense weight, and which of its entries are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from axsparse.samo.index.base import Index
from axsparse.samo.shards import BLOCK


@dataclass(eq=False)
class TensorState:
    """One trained parameter: its dense weight and where its kept entries stand.

    An alias is the second use of a tied weight on the stage of the first. It shares that weight's
    storage, index, master and moments, and has a gradient of its own.
    """

    name: str
    """Global parameter name."""
    parameter: nn.Parameter
    """Dense, in the training precision; zero at pruned positions."""
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
    partials: Tensor | None = None
    """The sums of squares of this step's gradient by blocks, if a GPU computed them with the last
    microbatch's gradient and nothing has been added since."""

    @property
    def index(self) -> Index:
        """The kept positions; an alias has those of its owner."""
        return self.alias_of.index if self.alias_of is not None else self.own_index

    @property
    def kept(self) -> int:
        """Kept entries."""
        return self.index.kept

    @property
    def is_half(self) -> bool:
        """Whether the weight is in half precision."""
        return self.parameter.itemsize == 2

    def positions(self) -> Tensor:
        """Flat positions of the kept entries on the host, int64, ascending."""
        return self.index.positions().cpu()

    @property
    def weight_D(self) -> Tensor:
        """The weight as a flat view."""
        return self.parameter.detach().view(-1)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The bounds of its blocks of kept entries, in order."""
        for start in range(0, self.kept, BLOCK):
            yield start, min(start + BLOCK, self.kept)

    def entries_in(self, part: range, start: int = 0, stop: int | None = None) -> range:
        """The kept entries of [start, stop), by default all, that a part of the buffers has."""
        stop = self.kept if stop is None else stop
        first = min(max(part.start - self.offset, start), stop)
        return range(first, max(first, min(part.stop - self.offset, stop)))
