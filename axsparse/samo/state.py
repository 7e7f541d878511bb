"""The training state of one layer, compressed to the kept entries.

One flat buffer a layer and kind (gradient, master, each moment), in which each tensor
has the kept entries [offset, offset + kept). Buffers belong to a layer and never to a
stage, because a view keeps its whole storage alive: a layer can be pruned, sharded or
freed by itself.

    "weight"       fp32 training: the weight is its own master, gathered for an update
    "fp32"         half training: an fp32 buffer of kept entries, of which the weight is rounded
    "remainder"    bf16 training: the weight is the master's upper half, a buffer has the lower
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axsparse.samo import precision
from axsparse.samo.index import Index, make_index
from axsparse.samo.memory import IndexKind, MasterKind, StateBytes

BLOCK = 65_536
"""Kept entries that are updated, and whose squares are summed, at a time. Part of the
numerics: the norm is a sum of one partial a block."""
_MASTERS = {"fp32": torch.float32, "remainder": torch.int16}


@dataclass(eq=False)
class TensorState:
    """One trained parameter: its dense weight and where its kept entries stand."""

    name: str
    """Global parameter name."""
    parameter: nn.Parameter
    """Dense, in the training precision; zero at pruned positions."""
    own_index: Index
    decays: bool
    """Whether weight decay applies."""
    alias_of: TensorState | None = None
    """The other use of the same weight on the same stage, which owns index, master and
    moments. An alias shares that weight's storage and has a gradient of its own."""
    offset: int = 0
    accumulated: bool = False
    """Whether this step's gradient has been written at least once."""

    @property
    def index(self) -> Index:
        """The kept positions; an alias has those of its owner."""
        return self.alias_of.index if self.alias_of is not None else self.own_index

    @property
    def kept(self) -> int:
        """Kept entries."""
        return self.index.kept

    @property
    def weight_D(self) -> Tensor:
        """The weight as a flat view."""
        return self.parameter.detach().view(-1)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The bounds of its blocks of kept entries, in order."""
        for start in range(0, self.kept, BLOCK):
            yield start, min(start + BLOCK, self.kept)


class LayerState:
    """Gradient, master weights and moments of one layer's trained tensors."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[TensorState],
        *,
        moments: Sequence[str],
        gradient_dtype: torch.dtype,
        master: MasterKind,
        index_kind: IndexKind = "int32",
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        """Buffers are allocated here; `write_master` fills them.

        `master` is where the fp32 master weights are, as above.
        `index_kind` is how tensors that are pruned later store their kept positions.
        `frozen` are the layer's untrained parameters, which cost their weight only.
        """
        self.name = name
        self.index_kind = index_kind
        self._splits_master = master == "remainder"
        self.frozen = tuple(frozen)
        # Aliases last, so that what is reduced over replicas is one contiguous piece.
        self.tensors = sorted(tensors, key=lambda tensor: tensor.alias_of is not None)
        self.owned = [tensor for tensor in self.tensors if tensor.alias_of is None]
        self._by_name = {tensor.name: tensor for tensor in self.tensors}
        owned, total = self._lay_out()
        self.gradient = torch.zeros(total, dtype=gradient_dtype)
        self.master_K = None if master == "weight" else torch.zeros(owned, dtype=_MASTERS[master])
        self.moments_K = {moment: torch.zeros(owned, dtype=torch.float32) for moment in moments}

    def _lay_out(self) -> tuple[int, int]:
        """Set the offsets; returns the kept entries of owned tensors and of all."""
        total = owned = 0
        for tensor in self.tensors:
            tensor.offset = total
            total += tensor.kept
            if tensor.alias_of is None:
                owned = total
        return owned, total

    def tensor(self, name: str) -> TensorState:
        """The tensor of a global parameter name; KeyError if it is not of this layer."""
        return self._by_name[name]

    # -- gradient ---------------------------------------------------------------------

    @property
    def reduced_gradient(self) -> Tensor:
        """The part of the gradient that replicas sum: all owned tensors."""
        last = self.owned[-1] if self.owned else None
        return self.gradient[: last.offset + last.kept if last else 0]

    def gradient_of(self, tensor: TensorState) -> Tensor:
        """The kept gradient of one tensor, a view."""
        return self.gradient[tensor.offset : tensor.offset + tensor.kept]

    def accumulate(self, tensor: TensorState, dense: Tensor) -> None:
        """Add a dense gradient's kept entries; the first of a step replaces what was there."""
        kept = tensor.index.gather(dense.reshape(-1), 0, tensor.kept)
        if tensor.accumulated:
            self.gradient_of(tensor).add_(kept)
        else:
            self.gradient_of(tensor).copy_(kept)
            tensor.accumulated = True

    # -- master weights and moments ---------------------------------------------------

    def read_master(self, tensor: TensorState, start: int, stop: int) -> Tensor:
        """The fp32 master weights of kept entries [start, stop); may be a view."""
        if self.master_K is None:
            return tensor.index.gather(tensor.weight_D, start, stop)
        own = self.master_K[tensor.offset + start : tensor.offset + stop]
        if self._splits_master:
            return precision.join(tensor.index.gather(tensor.weight_D, start, stop), own)
        return own

    def write_master(self, tensor: TensorState, start: int, values_K: Tensor) -> None:
        """Store master weights from `start` on, and expand them into the dense weight."""
        weight_K = precision.round_to(values_K, tensor.parameter.dtype)
        if self.master_K is not None:
            own = self.master_K[tensor.offset + start : tensor.offset + start + values_K.numel()]
            if self._splits_master:
                own.copy_(precision.remainder(values_K))
            elif own.data_ptr() != values_K.data_ptr():
                own.copy_(values_K)
        tensor.index.scatter(tensor.weight_D, weight_K, start)

    def master(self, name: str) -> Tensor:
        """All fp32 master weights of one tensor, kept entries only: what pruning scores."""
        tensor = self.tensor(name)
        return self.read_master(tensor, 0, tensor.kept)

    def moments_of(self, tensor: TensorState, start: int, stop: int) -> dict[str, Tensor]:
        """Views of the moments of kept entries [start, stop)."""
        begin, end = tensor.offset + start, tensor.offset + stop
        return {name: values[begin:end] for name, values in self.moments_K.items()}

    # -- masks ------------------------------------------------------------------------

    def remask(self, name: str, mask_D: Tensor) -> None:
        """Keep exactly the entries where the flat mask is True, between two steps.

        Entries kept before and after carry their master weight and moments over,
        exactly; entries that are new start at weight zero and moments zero. Buffers
        are replaced one at a time, so the extra memory is one new buffer. A layer with
        an alias of this tensor follows by `refit`.
        """
        changed = self.tensor(name)
        assert changed.alias_of is None, "an alias follows the tensor that owns its weight"
        numel = changed.parameter.numel()
        assert mask_D.shape == (numel,), f"{name}: a mask of {mask_D.shape} for {numel} entries"
        old_positions = changed.index.positions()
        new_index = make_index(mask_D, self.index_kind)
        new_positions = new_index.positions()
        # Where each new entry stood among the old ones; entries that were not there read 0.
        source = torch.searchsorted(old_positions, new_positions)
        found = source < old_positions.numel()
        found[found.clone()] = old_positions[source[found]] == new_positions[found]
        old_offsets = {tensor.name: (tensor.offset, tensor.kept) for tensor in self.tensors}

        changed.own_index = new_index
        owned, total = self._lay_out()

        def rebuild(old: Tensor, size: int, tensors: Sequence[TensorState]) -> Tensor:
            new = torch.zeros(size, dtype=old.dtype)
            for tensor in tensors:
                offset, kept = old_offsets[tensor.name]
                before = old[offset : offset + kept]
                after = new[tensor.offset : tensor.offset + tensor.kept]
                if tensor is changed:
                    after[found] = before[source[found]]
                else:
                    after.copy_(before)
            return new

        if self.master_K is not None:
            self.master_K = rebuild(self.master_K, owned, self.owned)
        for moment in list(self.moments_K):
            self.moments_K[moment] = rebuild(self.moments_K[moment], owned, self.owned)
        self.gradient = torch.zeros(total, dtype=self.gradient.dtype)
        survives_D = torch.zeros(numel, dtype=torch.bool)
        survives_D[new_positions[found]] = True
        changed.weight_D.masked_fill_(~survives_D, 0)

    def refit(self) -> None:
        """Lay the gradient out anew after the owner of an alias in this layer was re-masked."""
        _, total = self._lay_out()
        self.gradient = torch.zeros(total, dtype=self.gradient.dtype)

    # -- bytes ------------------------------------------------------------------------

    def live_bytes(self) -> StateBytes:
        """Bytes of the tensors that live, each storage once."""
        return StateBytes(
            weight=sum(tensor.parameter.nbytes for tensor in self.owned)
            + sum(parameter.nbytes for parameter in self.frozen),
            index=sum(tensor.index.nbytes for tensor in self.owned),
            gradient=self.gradient.nbytes,
            master=0 if self.master_K is None else self.master_K.nbytes,
            optimizer=sum(values.nbytes for values in self.moments_K.values()),
        )
