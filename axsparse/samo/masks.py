"""The protocol of masks: which entries of which tensors are kept, wherever that is decided.

`samo/layer_construction.py` and `samo/live_pruning.py` take any `Masks`; `pruning/` has the
implementations, from scores, from a ticket file or from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor


class Masks(Protocol):
    """A mask for every pruned tensor, by the global name of the weight; a tied weight has that of
    its first use. Masks must not depend on the layout: all replicas, and both stages of a tie, ask
    for the same tensor and must get the same bits.

        class FirstHalf:
            kept = {"block0.attention.weight": 8}

            def mask(self, name, shape, weight, within=None):
                return torch.arange(math.prod(shape)) < self.kept[name]
    """

    @property
    def kept(self) -> Mapping[str, int]:
        """The number of kept entries of each pruned tensor. Tensors that are not named stay dense.
        Known before any mask is made, since the planner counts bytes with it."""
        ...

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        """The flat mask of one pruned tensor: bool `(numel,)` on the host, True where an entry is
        kept, with exactly `kept[name]` True entries.

        `shape` is the tensor's. `weight()` gives its fp32 weights, and is only called if they
        matter for the mask. `within` has the flat positions that are kept now (int64, ascending)
        if the tensor is pruned already: then only some of them may be kept. May raise ConfigError.
        """
        ...


Shape: TypeAlias = tuple[int, ...]
"""The sizes of a parameter's dimensions."""
Weight: TypeAlias = Callable[[], Tensor]
"""Returns the fp32 weights of one tensor in its shape, on the host. May take long, so it is called
only where weights matter; the result may be a view of the state and must not be changed."""
