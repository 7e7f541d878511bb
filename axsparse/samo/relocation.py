"""How the values of a layer's flat buffers move when the mask of one of its tensors changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.runtime.communication import Op
from axsparse.samo.layer_shares import Shares
from axsparse.samo.tensor_state import TensorState


@dataclass(frozen=True)
class Relocation:
    """Where the values of a layer were, and which entries of the changed tensor stay kept."""

    shares: Shares
    """The shares, which are laid out anew before values are carried over."""
    changed: TensorState
    stays: Tensor
    """Whether each new kept entry of the changed tensor was kept before, bool."""
    before: Tensor
    """The old numbers of those that stay, int64, ascending."""
    old_places: Mapping[str, range]
    """Where each tensor's kept entries were in the flat buffers."""
    old_bounds: list[int]
    old_held: range

    def all_owned(self, held: Tensor) -> Tensor:
        """A buffer of all owned entries as they were, from this replica's held ones.

        All replicas call this together where the state is sharded.
        """
        if not self.shares.is_sharded:
            return held
        whole = held.new_zeros(self.old_bounds[-1])
        whole[self.old_held.start : self.old_held.stop] = held
        self.shares.replicas.exchange(Op.ALL_GATHER, whole, self.old_bounds)
        return whole

    def carry_over(self, old: Tensor, new: Tensor) -> None:
        """Copy what stays from a flat buffer of all owned entries into one of the new layout."""
        for tensor in self.shares.owned:
            place = self.old_places[tensor.name]
            before = old[place.start : place.stop]
            after = new[tensor.offset : tensor.offset + tensor.kept]
            if tensor is self.changed:
                after[self.stays] = before[self.before]
            else:
                after.copy_(before)


def relocation_to(new_positions: Tensor, changed: TensorState, shares: Shares) -> Relocation:
    """What happens to a layer when `changed` gets an index of these positions (int64, ascending,
    on the layer's device); `changed` and `shares` are as they are before."""
    old_positions = changed.index.positions()
    source = torch.searchsorted(old_positions, new_positions)
    stays = source < old_positions.numel()
    stays[stays.clone()] = old_positions[source[stays]] == new_positions[stays]
    return Relocation(
        shares=shares,
        changed=changed,
        stays=stays,
        before=source[stays],
        old_places={
            tensor.name: range(tensor.offset, tensor.offset + tensor.kept)
            for tensor in shares.tensors
        },
        old_bounds=shares.bounds,
        old_held=shares.held,
    )
