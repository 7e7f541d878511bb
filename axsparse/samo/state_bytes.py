"""Bytes per parameter of the model, defined in this one place.

Everything that says, predicts or checks how many bytes of weight, index, gradient, master or
optimizer state a parameter takes computes it here: `tensor_bytes`, `layer_bytes`, `stage_bytes`.
Change a size here and nowhere else; `tests/samo/test_state_bytes.py` compares it with the bytes of
live tensors.

Per tensor of n entries of which k are kept, w bytes a weight, a bytes an accumulated
gradient entry, m moments:

    weight     w·n
    index      0 if all are kept, else by encoding
      int32      4·k
      mask       n/8 + o·(n/2,048 + 1)
      auto       the smaller of the two, which is the mask above f = 0.032
    gradient   a·k
    master     4·k in half precision; 0 in fp32, where the weight is the master
    optimizer  4·m·k

Quotients are rounded up, the mask to words of 8 bytes. An offset takes o = 4 bytes, and 8 where k
is beyond int32. So AdamW with half weights and half accumulation, 16 to 20 bytes dense, costs for
each parameter, f = k/n of which are kept:

                              f = 0.1
    int32    2 + 18·f          3.80
    mask     2.127 + 14·f      3.53

Where d replicas shard the optimizer state, master and optimizer count the kept entries of a
replica's share (`shards.share_bounds`; nothing is padded), near k/d each:

    mask     2.127 + 2·f + 12·f/d    2.48 at d = 8

With `weights: sparse`, a weight of which something is pruned is dense only while its layer
computes, in memory (`expanded`) for the largest layer of a stage. At rest it takes nothing where
its masters are on the device, and w·k bytes in fp32 (where they are the masters) and where masters
are sharded or offloaded:

    mask     0.127 + 14·f              1.53
    mask     0.127 + 4·f + 12·f/d      0.68 at d = 8

Where replicas gather weights (ZeRO stage 3), they take nothing at rest and masters are separate in
every precision; two buffers (`expanded`) have the w·k bytes of the largest layer:

    mask     0.127 + 2·f + 12·f/d      0.48 at d = 8

Where masters and moments are offloaded, they are on the host, and the GPU has staging buffers for
two layers of the largest size. The second use of a tied weight costs its own full state on another
stage, and only its own gradient where both uses are on one stage. Untrained parameters cost their
weight only, tied ones once a stage; buffers of modules count as weights, in the type they have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Literal, TypeAlias

from axsparse.runtime.errors import ConfigError
from axsparse.samo.shards import share_bounds

if TYPE_CHECKING:
    import torch

    from axsparse.models.layer import Ties
    from axsparse.models.model_profile import LayerInfo, ParameterInfo

IndexKind: TypeAlias = Literal["auto", "int32", "mask"]
"""How kept positions are stored; `auto` takes for each tensor the encoding of fewer bytes."""
Encoding: TypeAlias = Literal["int32", "mask"]
"""How the kept positions of one tensor are stored."""
WeightKind: TypeAlias = Literal["dense", "sparse"]
"""How pruned weights are stored while their layer does not compute."""
INT32_LIMIT = 2**31 - 1
MASK_BLOCK = 2_048
"""Dense entries that share an offset: few enough to find any kept entry at once, and so many
that offsets of 8 bytes still leave a mask below 0.129 bytes an entry."""
MASK_WORD = 64
"""Dense entries of a word, the unit in which a mask is read."""
MASTER_BYTES = MOMENT_BYTES = 4
STAGED = 2
"""Layers whose offloaded state is staged on a GPU: one is updated, one is copied."""
GATHERED = 2
"""Layers whose kept weights are gathered: one is expanded, one is under way."""
ALIGNED = 256
"""Each staged or expanded tensor begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes by category."""

    weight: int = 0
    index: int = 0
    gradient: int = 0
    master: int = 0
    optimizer: int = 0
    staged: int = 0
    """Bytes of staging buffers on a GPU for offloaded masters and moments."""
    expanded: int = 0
    """Bytes in which the sparse weights of one layer at a time are dense, and gathered."""
    offloaded: int = 0
    """Masters and moments that rest in the memory of the host."""

    @property
    def total(self) -> int:
        """Bytes on the device that trains: all state but the offloaded."""
        every: int = sum(vars(self).values())
        return every - self.offloaded

    def __add__(self, other: StateBytes) -> StateBytes:
        # Searches add up millions; `astuple` takes 40 µs.
        return StateBytes(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class StateFormat:
    """The storage format of the training state: all settings that decide its bytes."""

    weight: torch.dtype
    """The type of weights, activations and messages."""
    gradient: torch.dtype
    """The type of accumulated gradients: the weights' type, fp32, or int64 for exact sums."""
    moments: tuple[str, ...] = ()
    """Names of the optimizer's moments."""
    index: IndexKind = "int32"
    """How tensors that are pruned now or later store their kept positions."""
    weights: WeightKind = "dense"
    """How pruned weights are stored at rest."""
    replicas: int = 1
    """Replicas that share the optimizer state; 1 if it is not sharded."""
    offload: bool = False
    """Whether masters and moments rest on the host."""
    gathers: bool = False
    """Whether replicas that share the optimizer state gather weights that are sparse at rest."""

    @property
    def is_half(self) -> bool:
        """Whether weights are bf16 or fp16, and fp32 masters are separate."""
        return self.weight.itemsize == 2

    @property
    def master_bytes(self) -> int:
        """Bytes of a kept entry's master, in addition to its weight."""
        return MASTER_BYTES if self.is_half or self.holds_none else 0

    @property
    def holds_none(self) -> bool:
        """Whether layers have no memory for sparse weights, which are gathered."""
        return self.gathers and self.weights == "sparse" and self.replicas > 1

    @property
    def stores_weights(self) -> bool:
        """Whether sparse weights have memory next to their masters: in fp32, where it is the
        masters', and where the device has not all masters, unless they are gathered."""
        is_partial = not self.is_half or self.replicas > 1 or self.offload
        return is_partial and not self.holds_none


@dataclass(frozen=True)
class TensorSize:
    """The properties of one tensor that decide its bytes."""

    numel: int
    """Entries before pruning."""
    kept: int
    """Entries that are kept; `numel` if it is not pruned."""
    trained: bool = True
    """False for frozen parameters, which cost their weight only."""
    is_alias: bool = False
    """Whether this is the second use of a tied weight on the stage of the first."""


def aligned_bytes(tensors: Iterable[int]) -> int:
    """Bytes of memory in which a layer's tensors of these bytes are staged or expanded."""
    return sum(-(-nbytes // ALIGNED) * ALIGNED for nbytes in tensors)


def fits_int32(number: int) -> bool:
    """Whether int32 can hold a number."""
    return number <= INT32_LIMIT


def index_bytes(numel: int, kept: int, kind: IndexKind) -> int:
    """Bytes of the index of one tensor."""
    if kept == numel:
        return 0
    if encoding_of(numel, kept, kind) == "int32":
        return 4 * kept
    return _mask_bytes(numel, kept)


def encoding_of(numel: int, kept: int, kind: IndexKind) -> Encoding:
    """The encoding of one pruned tensor: the one that is named, or for `auto` the one of fewer
    bytes. ConfigError if int32 is named and cannot number all entries."""
    if kind == "int32" and not fits_int32(numel):
        raise ConfigError(
            f"samo.index: int32 numbers {INT32_LIMIT} entries of a tensor and this one has "
            f"{numel}; choose mask or auto"
        )
    if kind != "auto":
        return kind
    return "int32" if fits_int32(numel) and 4 * kept < _mask_bytes(numel, kept) else "mask"


def _mask_bytes(numel: int, kept: int) -> int:
    offset = 4 if fits_int32(kept) else 8
    words = math.ceil(numel / MASK_WORD)
    return MASK_WORD // 8 * words + offset * (math.ceil(numel / MASK_BLOCK) + 1)


def tensor_bytes(size: TensorSize, stored: StateFormat) -> StateBytes:
    """The formula above for one tensor, neither sharded nor offloaded."""
    if not size.trained:
        return StateBytes(weight=0 if size.is_alias else stored.weight.itemsize * size.numel)
    if size.is_alias:
        return StateBytes(gradient=stored.gradient.itemsize * size.kept)
    stays = size.numel
    if is_sparse(size, stored):
        stays = size.kept if stored.stores_weights else 0
    return StateBytes(
        weight=stored.weight.itemsize * stays,
        index=index_bytes(size.numel, size.kept, stored.index),
        gradient=stored.gradient.itemsize * size.kept,
        master=stored.master_bytes * size.kept,
        optimizer=MOMENT_BYTES * len(stored.moments) * size.kept,
    )


def is_sparse(size: TensorSize, stored: StateFormat) -> bool:
    """Whether the weight of a tensor is sparse at rest."""
    return stored.weights == "sparse" and size.kept < size.numel and size.trained


def expanded_bytes(sizes: Iterable[TensorSize], stored: StateFormat) -> int:
    """Bytes in which the sparse weights of a layer are expanded."""
    return aligned_bytes(
        stored.weight.itemsize * size.numel for size in sizes if is_sparse(size, stored)
    )


def gathered_bytes(sizes: Sequence[TensorSize], stored: StateFormat) -> int:
    """Bytes of the buffers in which a layer's kept weights are gathered."""
    if not any(is_sparse(size, stored) and not size.is_alias for size in sizes):
        return 0
    is_gathered = stored.holds_none
    return is_gathered * GATHERED * stored.weight.itemsize * sum(map(owned_entries, sizes))


def owned_entries(size: TensorSize) -> int:
    """Kept entries that have a master, whose replicas may share them."""
    return size.kept if size.trained and not size.is_alias else 0


def layer_bytes(sizes: Sequence[TensorSize], stored: StateFormat, replica: int = 0) -> StateBytes:
    """The formula above for the tensors of one layer, in order, on one replica; not offloaded."""
    unsharded = sum((tensor_bytes(size, stored) for size in sizes), StateBytes())
    if stored.replicas == 1:
        return unsharded
    bounds = share_bounds([owned_entries(size) for size in sizes], stored.replicas)
    share = bounds[replica + 1] - bounds[replica]
    return replace(
        unsharded,
        master=stored.master_bytes * share,
        optimizer=MOMENT_BYTES * len(stored.moments) * share,
    )


def stage_bytes(
    layers: Sequence[LayerInfo],
    ties: Ties,
    kept: Mapping[str, int],
    stored: StateFormat,
    replica: int | None = None,
) -> StateBytes:
    """Bytes of the state of these layers on one rank.

    `kept` has the number of kept entries of each pruned tensor, by the name of its first use. Where
    the optimizer state is sharded, `replica` is the one in question; None: the one that holds most.
    """
    here = {parameter.name for layer in layers for parameter in layer.parameters}
    sizes = [
        [
            _size(parameter, kept, ties, is_alias=ties.get(parameter.name) in here)
            for parameter in layer.parameters
        ]
        for layer in layers
    ]
    if replica is None:
        replica = _fullest(sizes, stored.replicas)
    each = [
        layer_bytes(of_layer, stored, replica) + StateBytes(weight=layer.buffer_bytes)
        for layer, of_layer in zip(layers, sizes, strict=True)
    ]
    expanded = max((expanded_bytes(of_layer, stored) for of_layer in sizes), default=0)
    expanded += max((gathered_bytes(of_layer, stored) for of_layer in sizes), default=0)
    if not stored.offload:
        return sum(each, StateBytes(expanded=expanded))
    count = len(stored.moments)
    staged_layers = [
        aligned_bytes([state.master, *[state.optimizer // max(count, 1)] * count]) for state in each
    ]
    return replace(
        sum(each, StateBytes()),
        master=0,
        optimizer=0,
        staged=STAGED * max(staged_layers, default=0),
        expanded=expanded,
        offloaded=sum(state.master + state.optimizer for state in each),
    )


def _fullest(sizes: Iterable[Sequence[TensorSize]], replicas: int) -> int:
    """The replica whose shares of these layers have the most entries in total."""
    if replicas == 1:
        return 0
    entries = [0] * replicas
    for kept, times in Counter(tuple(map(owned_entries, of_layer)) for of_layer in sizes).items():
        for replica, (begin, end) in enumerate(pairwise(share_bounds(kept, replicas))):
            entries[replica] += times * (end - begin)
    return entries.index(max(entries))


def _size(
    parameter: ParameterInfo, kept: Mapping[str, int], ties: Ties, *, is_alias: bool
) -> TensorSize:
    numel = parameter.numel
    stays = kept.get(ties.get(parameter.name, parameter.name), numel)
    return TensorSize(
        numel, stays if parameter.trained else numel, trained=parameter.trained, is_alias=is_alias
    )
