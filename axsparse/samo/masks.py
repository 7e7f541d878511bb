"""Masks, the kept entries of each pruned tensor, and the pruning of live state by them.

`samo/layer_construction.py` and `prune_in_place` take any `Masks`; `pruning/` has the
implementations, from scores, from a mask file or from a checkpoint. Live state is pruned one
tensor at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from axsparse.runtime.canonical_form import bytes_of
from axsparse.samo.tensor_state import TensorState

if TYPE_CHECKING:
    from axsparse.models.layer import Ties
    from axsparse.samo.layer_construction import BuiltLayer
    from axsparse.samo.layer_state import LayerState

DIGESTS = 1 << 52
"""How many different digests of weights there are: fp64 holds each of them exactly."""
ROW = 512
"""Words of a row of a weight, whose rows and columns are summed for its digest."""


class Masks(Protocol):
    """A mask for every pruned tensor, by the global name of the weight; a tied weight has the name
    of its first use. Masks must not depend on the layout: all replicas, and both stages of a tie,
    ask for the same tensor and must get the same bits.

        class FirstHalf:
            kept = {"block0.attention.weight": 8}

            def mask(self, name, shape, weight, within=None):
                return torch.arange(math.prod(shape)) < self.kept[name]
    """

    @property
    def kept(self) -> Mapping[str, int]:
        """The number of kept entries of each pruned tensor. Tensors that are not named stay dense.
        Known before any mask is made, since the planner counts bytes with it."""

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        """The flat mask of one pruned tensor: bool `(numel,)` on the host, True where an entry is
        kept, with exactly `kept[name]` True entries.

        `shape` is the tensor's. `weight()` gives its fp32 weights, and is only called if they
        matter for the mask. `within` has the flat positions that are kept now (int64, ascending)
        if the tensor is pruned already: then only some of them may be kept, or all where they are
        fewer than `kept[name]`. May raise ConfigError.
        """


Shape: TypeAlias = tuple[int, ...]
"""The sizes of a parameter's dimensions."""
Weight: TypeAlias = Callable[[], Tensor]
"""Returns the fp32 weights of one tensor in its shape, on the host. May take long, so it is called
only where weights matter; the result may be a view of the state and must not be changed."""


def prune_in_place(layers: Sequence[BuiltLayer], ties: Ties, masks: Masks) -> None:
    """Prune the tensors that the masks name; kept weights and their moments stay as they are.

    A tensor that is pruned already keeps some of its kept entries. All replicas call this together.
    """
    for layer in layers:
        for name, tensor in layer.state.by_full_name.items():
            owner = ties.get(name, name)
            if owner in masks.kept:
                mask_D = masks.mask(
                    owner,
                    tensor.full_shape,
                    partial(layer.state.dense_master, name),
                    within=kept_positions(layer.state, tensor),
                )
                layer.state.remask(name, mask_D)
    for layer in layers:
        if any(tensor.alias_of is not None for tensor in layer.state.tensors):
            layer.state.refit()


def kept_positions(state: LayerState, tensor: TensorState) -> Tensor | None:
    """Flat positions of the kept entries of a pruned tensor; None if the tensor is dense. All ranks
    of the group ask for a sharded tensor together."""
    if tensor.full_kept == tensor.full_numel:
        return None
    if tensor.shard is None:
        return tensor.positions()
    return state.mask(tensor.full_name).nonzero()[:, 0]


def masks_digest(layers: Iterable[BuiltLayer]) -> int:
    """A 52-bit hash (exact as a float) of which entries of which tensors are kept: of sums of their
    positions, which a GPU makes in a tenth of the time that a hash of all positions takes."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in layers:
        for tensor in layer.state.owned:
            digest.update(f"{tensor.name} {tensor.kept} ".encode())
            if tensor.kept < tensor.parameter.numel():
                digest.update(sums_of_bits(tensor.index.positions()).cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 12


def weights_digest(layers: Iterable[BuiltLayer]) -> int:
    """A 52-bit hash (exact as a float) of sums of the weights' bits; waits for a GPU once. It is a
    sum over weights, modulo 2⁵², so that the hashes of a model's stages add to the model's."""
    sums = {
        name: sums_of_bits(weight.detach())
        for layer in layers
        for name, weight in layer.counted_parameters()
    }
    lengths = [len(one) for one in sums.values()]
    found = torch.cat(list(sums.values())).cpu().split(lengths) if sums else ()
    total = 0
    for name, of_weight in zip(sums, found, strict=True):
        digest = hashlib.blake2b(name.encode(), digest_size=8)
        digest.update(of_weight.numpy().tobytes())
        total += int.from_bytes(digest.digest(), "big")
    return total % DIGESTS


def sums_of_bits(values: Tensor) -> Tensor:
    """Sums modulo 2⁶⁴ of words of eight bytes, laid out in rows: a sum for each column, one for
    each row, and the words that fill no row, the last one filled up with zeros. A word that
    changes, and two words that change places, always change a sum."""
    raw = bytes_of(values)
    end = raw.numel() // (8 * ROW) * (8 * ROW)
    rest = F.pad(raw[end:], (0, -(raw.numel() - end) % 8)).view(torch.int64)
    rows = raw[:end].view(torch.int64).view(-1, ROW)
    return torch.cat((rows.sum(0), rows.sum(1), rest)) if end else rest
