"""What whoever builds or shrinks state needs of masks, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor


class Masks(Protocol):
    """A mask for every pruned tensor, by the global name of a weight's first use."""

    @property
    def kept(self) -> Mapping[str, int]:
        """Kept entries of the pruned tensors; whatever is not named stays dense."""
        ...

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        """The flat mask of one pruned tensor; of an already pruned one, some of the positions
        `within`."""
        ...


Shape: TypeAlias = tuple[int, ...]


Weight: TypeAlias = Callable[[], Tensor]
"""Gives the fp32 weights of one tensor, in its shape; called only where they matter, and the
result is not written to."""
