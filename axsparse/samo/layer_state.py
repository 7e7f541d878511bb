"""The training state of one layer, compressed to the kept entries.

One flat buffer a layer and kind (gradient, master, each moment), in which each tensor
has the kept entries [offset, offset + kept). Buffers belong to a layer and never to a
stage, because a view keeps its whole storage alive: a layer can be pruned, sharded or
freed by itself. Where replicas shard the optimizer state, master and moments have the
entries of this replica's share only (`samo/shards.py`); weight, index and gradient stay whole.

    "weight"       fp32 training: the weight is its own master, gathered for an update
    "fp32"         half training: an fp32 buffer of kept entries, of which the weight is rounded
    "remainder"    bf16 training: the weight is the master's upper half, a buffer has the lower
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from axsparse.runtime.communication import Op
from axsparse.samo import precision
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.cuda.compress_kernel import compress
from axsparse.samo.cuda.device_index import DeviceIndex
from axsparse.samo.shards import ALONE, BLOCK, Replicas, share_bounds
from axsparse.samo.state_bytes import IndexKind, MasterKind, StateBytes
from axsparse.samo.tensor_state import RestingState, TensorState, common

_MASTERS = {"fp32": torch.float32, "remainder": torch.int16}


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
        frozen: Sequence[Tensor] = (),
        replicas: Replicas = ALONE,
        backend: Backend = HOST,
    ) -> None:
        """Buffers are allocated here, and those of moments once they are asked for;
        `write_master` fills them.

        `master` is where the fp32 master weights are, as above.
        `index_kind` is how tensors that are pruned later store their kept positions.
        `frozen` are the layer's untrained parameters and its buffers, which cost what they are.
        `backend` is where all of it lives, the parameters of `tensors` included.
        """
        self.name = name
        self.index_kind = index_kind
        self._splits_master = master == "remainder"
        self.frozen = tuple(frozen)
        self._replicas = replicas
        self.backend = backend
        # Aliases last, so that what is reduced over replicas is one contiguous piece.
        self.tensors = sorted(tensors, key=lambda tensor: tensor.alias_of is not None)
        self.owned = [tensor for tensor in self.tensors if tensor.alias_of is None]
        self._by_name = {tensor.name: tensor for tensor in self.tensors}
        self.bounds: list[int] = []
        """Where the replicas' shares of the owned entries begin and end."""
        self.gradient = self._zeros(self._lay_out(), gradient_dtype)
        held = len(self.held)
        self._master_K = None if master == "weight" else backend.rest(held, _MASTERS[master])
        self._moments = tuple(moments)
        self._moments_K: dict[str, Tensor] = {}
        self._visit: RestingState | None = None
        self.settle: Callable[[], None] = _nothing
        """Waits until what rests on the host is what the last update left."""

    def _zeros(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.backend.device)

    def _lay_out(self) -> int:
        """Set offsets and bounds; returns the kept entries of all tensors, aliases included."""
        total = 0
        for tensor in self.tensors:
            tensor.offset = total
            total += tensor.kept
        self.bounds = share_bounds([tensor.kept for tensor in self.owned], self._replicas.size)
        return total

    def tensor(self, name: str) -> TensorState:
        """The tensor of a global parameter name; KeyError if it is not of this layer."""
        return self._by_name[name]

    # -- shares -----------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether master and moments are this replica's share only."""
        return self._replicas.shard and self._replicas.size > 1

    @property
    def share(self) -> range:
        """The entries of the flat buffers that this replica answers for: whole blocks."""
        rank = self._replicas.rank
        return range(self.bounds[rank], self.bounds[rank + 1])

    @property
    def held(self) -> range:
        """The entries whose master and moments are here, and are updated here."""
        return self.share if self.is_sharded else range(self.bounds[-1])

    def blocks(self, tensor: TensorState, part: range) -> Iterator[tuple[int, int]]:
        """The bounds of a tensor's blocks that lie in a part of the flat buffers."""
        for start, stop in tensor.blocks():
            if part.start <= tensor.offset + start and tensor.offset + stop <= part.stop:
                yield start, stop

    def _gathered(self, tensor: TensorState, read: Callable[[int, int], Tensor]) -> Tensor:
        """All of a tensor's values of which `read(start, stop)` has the held ones, in fp32."""
        own = common(self.held, tensor)
        if not self.is_sharded:
            return read(own.start, own.stop)
        whole = self._zeros(tensor.kept)
        whole[own.start : own.stop] = read(own.start, own.stop)
        bounds = [min(max(bound - tensor.offset, 0), tensor.kept) for bound in self.bounds]
        self._replicas.exchange(Op.ALL_GATHER, whole, bounds)
        return whole

    # -- gradient ---------------------------------------------------------------------

    @property
    def reduced_gradient(self) -> Tensor:
        """The part of the gradient that replicas sum: all owned tensors."""
        return self.gradient[: self.bounds[-1]]

    def gradient_of(self, tensor: TensorState) -> Tensor:
        """The kept gradient of one tensor, a view."""
        return self.gradient[tensor.offset : tensor.offset + tensor.kept]

    def gather_gradient(self) -> None:
        """Receive the sums of the other replicas' shares, after a step; all replicas together."""
        if self.is_sharded:
            self._replicas.exchange(Op.ALL_GATHER, self.reduced_gradient, self.bounds)

    def dense_gradient(self, name: str) -> Tensor:
        """The gradient that is here in the parameter's shape, fp32 on the host, zero at pruned
        positions."""
        tensor = self.tensor(name)
        return self._dense(tensor, self.gradient_of(tensor).float())

    def _dense(self, tensor: TensorState, values_K: Tensor) -> Tensor:
        """Values of a tensor's kept entries in the parameter's shape, on the host."""
        dense_D = self._zeros(tensor.parameter.numel())
        tensor.index.scatter(dense_D, values_K, 0)
        return dense_D.cpu().view(tensor.parameter.shape)

    def accumulate(self, tensor: TensorState, dense: Tensor, *, is_last: bool = False) -> None:
        """Add a dense gradient's kept entries; the first of a step replaces what was there.

        `is_last`: no microbatch follows, so that a kernel can sum the squares on its way.
        """
        index, gradient_K = tensor.index, self.gradient_of(tensor)
        if isinstance(index, DeviceIndex):
            partials = None
            if is_last and self._replicas.size == 1:
                blocks = -(-tensor.kept // BLOCK)
                partials = gradient_K.new_empty(blocks, dtype=torch.float64)
            adds = tensor.accumulated
            compress(index, dense.reshape(-1), gradient_K, accumulate=adds, partials=partials)
            tensor.partials = partials
        elif tensor.accumulated:
            gradient_K.add_(index.gather(dense.reshape(-1), 0, tensor.kept))
        else:
            gradient_K.copy_(index.gather(dense.reshape(-1), 0, tensor.kept))
        tensor.accumulated = True

    # -- master weights and moments ---------------------------------------------------

    @property
    def moments_K(self) -> dict[str, Tensor]:
        """The held values of each moment, fp32; zero at first."""
        if self._visit is not None:
            return self._visit.moments
        self.settle()
        return self.resting().moments

    @property
    def master_K(self) -> Tensor | None:
        """The held masters or their remainders; None where fp32 weights are their own."""
        if self._visit is not None:
            return self._visit.master
        self.settle()
        return self._master_K  # moments are not to be allocated for its sake

    def resting(self) -> RestingState:
        """Masters and moments where they are between updates; what an update left may still be on
        its way there."""
        if not self._moments_K:
            size, rest = len(self.held), self.backend.rest
            self._moments_K.update((name, rest(size, torch.float32)) for name in self._moments)
        return RestingState(self._master_K, self._moments_K)

    @contextmanager
    def visiting(self, here: RestingState) -> Iterator[None]:
        """Within, masters and moments are these, equal to those that rest."""
        self._visit = here
        try:
            yield
        finally:
            self._visit = None

    def read_master(self, tensor: TensorState, start: int, stop: int) -> Tensor:
        """The fp32 master weights of kept entries [start, stop), all held; may be a view."""
        master_K = self.master_K
        if master_K is None:
            return tensor.index.gather(tensor.weight_D, start, stop)
        own = master_K[self.held_slice(tensor, start, stop)].to(self.backend.device)
        if self._splits_master:
            return precision.join(tensor.index.gather(tensor.weight_D, start, stop), own)
        return own

    def write_master(self, tensor: TensorState, start: int, values_K: Tensor) -> None:
        """Store the held ones of the master weights from `start` on, and expand them all
        into the dense weight."""
        weight_K = precision.round_to(values_K, tensor.parameter.dtype)
        held = common(self.held, tensor, start, start + values_K.numel())
        master_K = self.master_K
        if master_K is not None and held:
            own = master_K[self.held_slice(tensor, held.start, held.stop)]
            values_K = values_K[held.start - start : held.stop - start]
            if self._splits_master:
                own.copy_(precision.remainder(values_K))
            elif own.data_ptr() != values_K.data_ptr():
                own.copy_(values_K)
        tensor.index.scatter(tensor.weight_D, weight_K, start)

    def master(self, name: str) -> Tensor:
        """All fp32 master weights of one tensor, kept entries only, on the host: what pruning
        scores; may be a view.

        All replicas ask for it together where the state is sharded.
        """
        return self._whole_master(self.tensor(name)).cpu()

    def _whole_master(self, tensor: TensorState) -> Tensor:
        if self._master_K is None:
            return self.read_master(tensor, 0, tensor.kept)
        return self._gathered(tensor, lambda start, stop: self.read_master(tensor, start, stop))

    def dense_master(self, name: str) -> Tensor:
        """As `master`, in the parameter's shape: zero at pruned positions; may be a view."""
        tensor = self.tensor(name)
        if tensor.kept == tensor.parameter.numel():
            return self.master(name).view(tensor.parameter.shape)
        return self._dense(tensor, self._whole_master(tensor))

    def reset_moments(self) -> None:
        """Set all moments to zero."""
        for values_K in self.moments_K.values():
            values_K.zero_()

    def moment(self, name: str, moment: str) -> Tensor:
        """All values of one moment of a tensor, kept entries only; as `master`."""
        tensor, values_K = self.tensor(name), self.moments_K[moment]
        return self._gathered(
            tensor, lambda start, stop: values_K[self.held_slice(tensor, start, stop)]
        ).cpu()

    def moments_of(self, tensor: TensorState, start: int, stop: int) -> dict[str, Tensor]:
        """Views of the moments of kept entries [start, stop), all held."""
        held = self.held_slice(tensor, start, stop)
        return {name: values[held] for name, values in self.moments_K.items()}

    def held_slice(self, tensor: TensorState, start: int, stop: int) -> slice:
        """Where a tensor's kept entries [start, stop) stand in the buffers of held entries."""
        begin, end = tensor.offset + start - self.held.start, tensor.offset + stop - self.held.start
        assert begin == end or 0 <= begin < end <= len(self.held), "another replica holds these"
        return slice(begin, end)

    # -- weights of sharded state ------------------------------------------------------

    @property
    def exchanged_weights(self) -> Tensor:
        """A buffer for the kept weights of all owned tensors, in the weights' type.

        It is the gradient's: an update has used that up, and the next step's first gradient
        replaces it.
        """
        dtype = self.owned[0].parameter.dtype if self.owned else self.gradient.dtype
        return self.gradient.view(dtype)[: self.bounds[-1]]

    def collect_weights(self) -> None:
        """Put the kept weights of this replica's share where they are exchanged."""
        exchanged = self.exchanged_weights
        for tensor in self.owned:
            for start, stop in self.blocks(tensor, self.share):
                weight_K = tensor.index.gather(tensor.weight_D, start, stop)
                exchanged[tensor.offset + start : tensor.offset + stop] = weight_K

    def expand_weights(self) -> None:
        """Write the kept weights of the other replicas' shares into the dense weights."""
        exchanged = self.exchanged_weights
        for tensor in self.owned:
            own = common(self.share, tensor)
            for start, stop in ((0, own.start), (own.stop, tensor.kept)):
                weight_K = exchanged[tensor.offset + start : tensor.offset + stop]
                tensor.index.scatter(tensor.weight_D, weight_K, start)

    # -- masks ------------------------------------------------------------------------

    def remask(self, name: str, mask_D: Tensor) -> None:
        """Keep exactly the entries where the flat mask, of the host, is True, between two steps.

        Entries kept before and after carry their master weight, moments and gradient over,
        exactly; entries that are new start at zero. Buffers are replaced one at a time, so the
        extra memory is one new buffer, and the whole of the old one where it is sharded. A layer
        with an alias of this tensor follows by `refit`. All replicas call this together.
        """
        changed = self.tensor(name)
        assert changed.alias_of is None, "an alias follows the tensor that owns its weight"
        numel = changed.parameter.numel()
        assert mask_D.shape == (numel,), f"{name}: a mask of {mask_D.shape} for {numel} entries"
        old_positions = changed.index.positions()
        new_index = self.backend.index(mask_D, self.index_kind)
        new_positions = new_index.positions()
        # Where each new entry stood among the old ones; entries that were not there read 0.
        source = torch.searchsorted(old_positions, new_positions)
        found = source < old_positions.numel()
        found[found.clone()] = old_positions[source[found]] == new_positions[found]
        old_places = {tensor.name: (tensor.offset, tensor.kept) for tensor in self.tensors}
        old_bounds, old_held = self.bounds, self.held

        changed.own_index = new_index
        total = self._lay_out()

        def carry_over(tensor: TensorState, before: Tensor, after: Tensor) -> None:
            if tensor is changed:
                after[found] = before[source[found]]
            else:
                after.copy_(before)

        def rebuild(resting: Tensor) -> Tensor:
            old = held = resting.to(self.backend.device)
            if self.is_sharded:
                old = held.new_zeros(old_bounds[-1])
                old[old_held.start : old_held.stop] = held
                self._replicas.exchange(Op.ALL_GATHER, old, old_bounds)
            new = held.new_zeros(self.bounds[-1])
            for tensor in self.owned:
                offset, kept = old_places[tensor.name]
                after = new[tensor.offset : tensor.offset + tensor.kept]
                carry_over(tensor, old[offset : offset + kept], after)
            own = new[self.held.start : self.held.stop] if self.is_sharded else new
            if self.is_sharded or self.backend.host is not None:
                return self.backend.rest(len(self.held), new.dtype).copy_(own)
            return own

        self.settle()
        if self._master_K is not None:
            self._master_K = rebuild(self._master_K)
        for moment, values_K in self._moments_K.items():
            self._moments_K[moment] = rebuild(values_K)
        old_gradient, self.gradient = self.gradient, self.gradient.new_zeros(total)
        for tensor in self.owned:
            offset, kept = old_places[tensor.name]
            carry_over(tensor, old_gradient[offset : offset + kept], self.gradient_of(tensor))
        survives_D = self._zeros(numel, torch.bool)
        survives_D[new_positions[found]] = True
        changed.weight_D.masked_fill_(~survives_D, 0)

    def refit(self) -> None:
        """Lay the gradient out anew after the owner of an alias in this layer was re-masked."""
        self.gradient = self._zeros(self._lay_out(), self.gradient.dtype)

    # -- bytes ------------------------------------------------------------------------

    def live_bytes(self) -> StateBytes:
        """Bytes of the tensors that live, each storage once."""
        resting = self.resting()
        master = 0 if resting.master is None else resting.master.nbytes
        optimizer = sum(values.nbytes for values in resting.moments.values())
        on_host = self.backend.host is not None
        return StateBytes(
            weight=sum(tensor.parameter.nbytes for tensor in self.owned)
            + sum(parameter.nbytes for parameter in self.frozen),
            index=sum(tensor.index.nbytes for tensor in self.owned),
            gradient=self.gradient.nbytes,
            master=0 if on_host else master,
            optimizer=0 if on_host else optimizer,
            offloaded=master + optimizer if on_host else 0,
        )


def _nothing() -> None:
    """What stays where it is read is always what the last update left."""
