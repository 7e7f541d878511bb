"""The training state of one layer, compressed to the kept entries.

Gradient, fp32 master weights and the optimizer's moments have flat buffers; `samo/tensor_state.py`
says where each entry stands and which replica holds it. Weight, index and gradient are complete on
every replica, also where the optimizer state is sharded.

Weights are dense. With an `Expansion` (`samo/expansion.py`), pruned ones are sparse at rest: where
a replica has all masters on its device these are the weights, and otherwise (fp32, sharded or
offloaded masters) the kept weights are stored in the training precision. In ZeRO stage 3 they have
no memory: between two steps the gradient's memory has them (`lend_gradient`), and from a step's
first backward on the replicas gather them.

In fp32 training a weight is its own master, which is gathered for an update; in half precision
masters are an fp32 buffer of held entries, from which weights are rounded. Moments are fp32 buffers
of held entries. Masters and moments may be offloaded to the host and
staged on the GPU for an update (`samo/offload.py`).

Each layer has separate buffers, so that it can be pruned or freed by itself: a view keeps its
entire storage alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from axsparse.models.layer import ShardGroup
from axsparse.runtime.communication import Collective, Op
from axsparse.runtime.errors import ConfigError
from axsparse.samo import fixed_point, precision
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.cuda.kernels import add_exact, finish_exact
from axsparse.samo.expansion import Expansion
from axsparse.samo.shards import ALONE, Replicas
from axsparse.samo.state_bytes import StateBytes, StateFormat
from axsparse.samo.tensor_state import Relocation, Shares, TensorState


@dataclass(frozen=True)
class StateBuffers:
    """A layer's masters and moments in one place, on the host or on the GPU."""

    master: Tensor | None
    """None where fp32 weights are their own masters."""
    moments: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers, the master first."""
        return [*([] if self.master is None else [self.master]), *self.moments.values()]


class OptimizerState:
    """Reads and writes the masters and moments of one layer, wherever they are."""

    def __init__(
        self, shares: Shares, stored: StateFormat, backend: Backend, *, gathers: bool
    ) -> None:
        """`write_master` fills the masters; moments are allocated when first asked for. `gathers`
        as in `LayerState`."""
        self._shares = shares
        self._backend = backend
        self._master_K = None
        if stored.weight != torch.float32 or gathers:
            self._master_K = backend.rest(len(shares.held), torch.float32)
        self._names = stored.moments
        self._moments_K: dict[str, Tensor] = {}
        self._staged: StateBuffers | None = None
        self.finish_copies: Callable[[], None] = lambda: None
        """Waits until the buffers on the host have the values of the last update."""

    @property
    def moments_K(self) -> dict[str, Tensor]:
        """The held values of each moment, fp32; zero before the first update."""
        if self._staged is not None:
            return self._staged.moments
        self.finish_copies()
        return self.stored().moments

    @property
    def master_K(self) -> Tensor | None:
        """The held masters, fp32; None where fp32 weights are their own masters."""
        if self._staged is not None:
            return self._staged.master
        self.finish_copies()
        return self._master_K  # not by `stored`, which would allocate the moments

    def stored(self) -> StateBuffers:
        """The buffers where they are between updates. Before `finish_copies` returns, values of the
        last update may still be missing there."""
        if not self._moments_K:
            size, rest = len(self._shares.held), self._backend.rest
            self._moments_K.update((name, rest(size, torch.float32)) for name in self._names)
        return StateBuffers(self._master_K, self._moments_K)

    @contextmanager
    def staged(self, here: StateBuffers) -> Iterator[None]:
        """Within this context `here`, a copy of the resting buffers, is read and written."""
        self._staged = here
        try:
            yield
        finally:
            self._staged = None

    def read_master(self, tensor: TensorState, start: int, stop: int) -> Tensor:
        """The fp32 master weights of kept entries [start, stop), all held; may be a view."""
        master_K = self.master_K
        if master_K is None:
            return self.read_weight(tensor, start, stop)
        return master_K[self._shares.shard_slice(tensor, start, stop)].to(self._backend.device)

    def write_master(self, tensor: TensorState, start: int, values_K: Tensor) -> None:
        """Store new fp32 master weights of the kept entries from `start` on, as far as they are
        held, and round all of them into the weight."""
        weight_K = precision.round_to(values_K, tensor.parameter.dtype)
        held = tensor.entries_in(self._shares.held, start, start + values_K.numel())
        master_K = self.master_K
        if master_K is not None and held:
            stored_K = master_K[self._shares.shard_slice(tensor, held.start, held.stop)]
            values_K = values_K[held.start - start : held.stop - start]
            if stored_K.data_ptr() != values_K.data_ptr():
                stored_K.copy_(values_K)
        if tensor.expanded_at is None:
            tensor.index.scatter(tensor.weight_D, weight_K, start)
        if tensor.kept_weight is not None:
            tensor.kept_weight[start : start + weight_K.numel()] = weight_K

    def at_rest(self, tensor: TensorState) -> Tensor:
        """The values of a sparse weight, `(kept,)`: in the training precision, or as fp32 masters
        that are rounded to it; may be a view."""
        if tensor.kept_weight is not None:
            return tensor.kept_weight
        return self.read_master(tensor, 0, tensor.kept)

    def read_weight(self, tensor: TensorState, start: int, stop: int) -> Tensor:
        """The kept weights [start, stop) in the training precision; may be a view."""
        if tensor.kept_weight is not None:
            return tensor.kept_weight[start:stop]
        return tensor.index.gather(tensor.weight_D, start, stop)

    def full_master(self, tensor: TensorState) -> Tensor:
        """The fp32 masters of all kept entries, `(kept,)`, on the layer's device; may be a view.

        All replicas call this together where the state is sharded.
        """
        if self._master_K is None:
            return self.read_weight(tensor, 0, tensor.kept)
        held = tensor.entries_in(self._shares.held)
        return self._shares.gathered(tensor, self.read_master(tensor, held.start, held.stop))

    def moments_of(self, tensor: TensorState, start: int, stop: int) -> dict[str, Tensor]:
        """Views of the moments of kept entries [start, stop), all held."""
        part = self._shares.shard_slice(tensor, start, stop)
        return {name: values[part] for name, values in self.moments_K.items()}

    def full_moment(self, tensor: TensorState, moment: str) -> Tensor:
        """One moment of all kept entries, `(kept,)`: on the layer's device where the state is
        sharded, and all replicas call this together; else maybe a view of where moments rest."""
        held = tensor.entries_in(self._shares.held)
        values_K = self.moments_of(tensor, held.start, held.stop)[moment]
        if self._shares.is_sharded:  # offloaded ones are on the host, and stay there otherwise
            values_K = values_K.to(self._backend.device)
        return self._shares.gathered(tensor, values_K)

    def reset_moments(self) -> None:
        for values_K in self.moments_K.values():
            values_K.zero_()

    def relocate(self, relocation: Relocation) -> None:
        """Move all values to their places in the shares, which have just been laid out anew.

        Buffers are replaced one at a time. All replicas call this together.
        """
        self.finish_copies()
        if self._master_K is not None:
            self._master_K = self._relocated(relocation, self._master_K)
        for moment, values_K in self._moments_K.items():
            self._moments_K[moment] = self._relocated(relocation, values_K)

    def _relocated(self, relocation: Relocation, stored: Tensor) -> Tensor:
        shares = self._shares
        new = relocation.moved(relocation.all_owned(stored.to(self._backend.device)))
        if shares.is_sharded or self._backend.host is not None:
            held = new[shares.held.start : shares.held.stop]
            return self._backend.rest(len(shares.held), new.dtype).copy_(held)
        return new

    def live_bytes(self) -> StateBytes:
        stored = self.stored()
        master = 0 if stored.master is None else stored.master.nbytes
        optimizer = sum(values.nbytes for values in stored.moments.values())
        if self._backend.host is not None:
            return StateBytes(offloaded=master + optimizer)
        return StateBytes(master=master, optimizer=optimizer)


class LayerState:
    """Gradient, master weights and moments of one layer's trained tensors."""

    # Reason: the contents of a layer's state, and the owners of its other parts.
    def __init__(
        self,
        name: str,
        tensors: Sequence[TensorState],
        stored: StateFormat,
        *,
        frozen: Sequence[Tensor] = (),
        replicas: Replicas = ALONE,
        group: ShardGroup | None = None,
        backend: Backend = HOST,
        expansion: Expansion | None = None,
    ) -> None:
        """Allocate the buffers; `optimizer_state.write_master` fills them.

        `frozen` are the layer's untrained parameters and its buffers, counted as they are. `group`
        has the other shards of sharded tensors. `backend` is where all of the state is, parameters
        included. With an `expansion` pruned weights are sparse at rest, now and later.
        """
        self.gathers = expansion is not None and stored.holds_none
        """Whether replicas gather the weights before they use them, and hold none (ZeRO stage 3).
        Masters are then separate in every precision, and updates write to these alone."""
        self.has_weights = False
        """Whether the gradient's memory has the kept weights of all owned tensors."""
        self.name = name
        self.group = group
        self.frozen = tuple(frozen)
        self.backend = backend
        self._index_kind = stored.index
        self.shares = Shares(tensors, replicas)
        self.tensors = self.shares.tensors
        """All trained tensors; aliases come last."""
        self.owned = self.shares.owned
        """The tensors that have a separate master: all but aliases."""
        self.by_full_name = {tensor.full_name: tensor for tensor in self.owned}
        self._lay_gradient(self._zeros(self.shares.total, stored.gradient))
        self.most = self._zeros(len(self.tensors) if self.is_exact else 0)
        """By tensor, the largest absolute value that sums of integers took in this step."""
        for number, tensor in enumerate(self.tensors if self.is_exact else ()):
            tensor.most = self.most[number : number + 1]
        self.optimizer_state = OptimizerState(self.shares, stored, backend, gathers=self.gathers)
        self._looks, self._is_written_uncounted = 0, False
        self._expansion = expansion
        self._stores_weights = stored.stores_weights
        """Whether kept weights have separate memory, since not all masters are on the device."""
        if expansion is not None:
            expansion.register(self)
        for tensor in self.tensors:
            if self._is_sparse(tensor):
                self._make_sparse(tensor)
        if self.gathers:
            self.lend_gradient()

    def _zeros(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.backend.device)

    # -- weights that are sparse at rest ------------------------------------------------

    def expand(self) -> None:
        """Make the sparse weights dense, in the place of another layer's."""
        if self._expansion is not None:
            self._expansion.expand(self)

    def expanded(self) -> AbstractContextManager[None]:
        """A block in which all weights are dense."""
        return nullcontext() if self._expansion is None else self._expansion.expanded(self)

    def lends(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory that the next layer's weights overwrite."""
        return self._expansion is not None and self._expansion.has(tensor)

    def _is_sparse(self, tensor: TensorState) -> bool:
        return self._expansion is not None and tensor.kept < tensor.parameter.numel()

    def _make_sparse(self, tensor: TensorState, weight_K: Tensor | None = None) -> None:
        """Take a weight out of its dense memory; `weight_K` are its kept weights, 0 if None."""
        assert self._expansion is not None
        if tensor.alias_of is None and self._stores_weights:
            zeros = partial(self._zeros, tensor.kept, self._expansion.dtype)
            tensor.kept_weight = zeros() if weight_K is None else weight_K
        if tensor.expanded_at is None:
            self._expansion.add(tensor, self)
        self._expansion.fit_gathers()

    def lend_gradient(self) -> None:
        """Note that the gradient's memory has the kept weights now, which `exchanged_weights` is a
        view of; until the first gradient of a step they need no other."""
        assert self.gathers, f"{self.name} has memory for its weights"
        exchanged, self.has_weights = self.exchanged_weights, True
        for tensor in self.owned:
            tensor.kept_weight = exchanged[self._span(tensor)]

    def reclaim_gradient(self) -> None:
        """Note that the gradient's memory has gradients from now on."""
        if self.has_weights:
            self.has_weights = False
            for tensor in self.owned:
                tensor.kept_weight = None

    # -- gradient ---------------------------------------------------------------------

    def _lay_gradient(self, accumulator: Tensor) -> None:
        self.accumulator = accumulator
        """The sums of microbatches, uses and replicas, flat: the gradient itself, or integers
        (`samo/fixed_point.py`)."""
        self.gradient = accumulator
        """The gradient of all tensors, flat. Where sums are integers, `finish_gradient` makes the
        gradient from the sums, in the memory of the sums."""
        if self.is_exact:
            self.gradient = accumulator.view(torch.float32)[: accumulator.numel()]

    @property
    def is_exact(self) -> bool:
        """Whether gradients accumulate as integers."""
        return self.accumulator.dtype == torch.int64

    def finish_gradient(self) -> None:
        """Make the gradient from the sums, once these are complete."""
        for tensor in self.owned if self.is_exact else ():
            part, launch = self._span(tensor), self.backend.launch
            if launch is None:
                fixed_point.in_fp32(self.accumulator, part, tensor.unit)
            else:
                finish_exact(launch, self.accumulator, part, tensor.unit)

    @property
    def owned_sums(self) -> Tensor:
        """The accumulated gradient of all owned tensors, which is the part that replicas sum."""
        return self.accumulator[: self.shares.bounds[-1]]

    def sums_of(self, tensor: TensorState) -> Tensor:
        """The accumulated kept gradient of one tensor, a view."""
        return self.accumulator[self._span(tensor)]

    def gradient_of(self, tensor: TensorState) -> Tensor:
        """The kept gradient of one tensor, a view."""
        return self.gradient[self._span(tensor)]

    @staticmethod
    def _span(tensor: TensorState) -> slice:
        return slice(tensor.offset, tensor.offset + tensor.kept)

    def accumulate(self, tensor: TensorState, dense: Tensor) -> None:
        """Add a dense gradient's kept entries; the first of a step replaces the last step's."""
        dense_D, index, adds = dense.reshape(-1), tensor.index, tensor.accumulated
        sums_K = self.sums_of(tensor)
        if not self.is_exact:
            self.backend.compress(index, dense_D, sums_K, adds=adds)
        elif index.on_device is not None:
            add_exact(index.on_device, dense_D, sums_K, tensor.unit, tensor.most, accumulate=adds)
        else:
            self.accumulate_kept(tensor, index.gather(dense_D, 0, tensor.kept))
        tensor.accumulated = True

    def accumulate_small(self, gradients: Sequence[tuple[TensorState, Tensor]]) -> None:
        """`accumulate` of dense gradients of tensors of which all is kept, with fewer calls."""
        assert not self.is_exact
        for adds, join in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            pairs = [pair for pair in gradients if pair[0].accumulated is adds]
            if pairs:
                sums = [self.gradient_of(tensor) for tensor, _ in pairs]
                join(sums, [dense.reshape(-1) for _, dense in pairs])
        for tensor, _ in gradients:
            tensor.accumulated = True

    def accumulate_kept(self, tensor: TensorState, values_K: Tensor) -> None:
        """`accumulate` of a gradient of which only the kept entries are there, on the host."""
        sums_K = self.sums_of(tensor)
        if self.is_exact:
            unit, most = tensor.unit, tensor.most
            fixed_point.add(sums_K, values_K, unit, most, adds=tensor.accumulated)
        elif tensor.accumulated:
            sums_K.add_(values_K)
        else:
            sums_K.copy_(values_K)
        tensor.accumulated = True

    def begin_step(self) -> None:
        """Open a step: the first gradient of each tensor replaces the last step's."""
        for tensor in self.tensors:
            tensor.accumulated = False
        if self.is_exact:
            self.most.zero_()

    def running_gradient(self, tensor: TensorState) -> Tensor | None:
        """A view of a tensor's gradient in the parameter's shape, to which autograd may add by
        itself. None where the gradient must be compressed, or added in another type."""
        parameter = tensor.parameter
        is_pruned = tensor.kept < parameter.numel()
        if is_pruned or self.is_exact or self.gradient.dtype != parameter.dtype:
            return None
        return self.gradient_of(tensor).view(parameter.shape)

    def gather_gradient(self) -> None:
        """Receive the gradients of the other replicas' shares, summed; all replicas call this."""
        if self.shares.is_sharded:
            owned = self.gradient[: self.shares.bounds[-1]]
            self.shares.replicas.exchange(Op.ALL_GATHER, owned, self.shares.bounds)

    # -- one full tensor by its name, for pruning and checkpoints -------------------------

    def dense_gradient(self, name: str) -> Tensor:
        """This replica's gradient in the parameter's shape, fp32 on the host; 0 where pruned. All
        ranks of the group ask for a sharded tensor together."""
        # A copy: a custom score may change its arguments.
        return self._dense_full(name, lambda tensor: self.gradient_of(tensor).float().clone())

    def master(self, name: str) -> Tensor:
        """All fp32 master weights of one tensor, kept entries only, on the host; may be a view.
        Asked for by all replicas together where the state is sharded, and by all ranks of the group
        where the tensor is."""
        return self._kept_of_full(name, self.optimizer_state.full_master)

    def dense_master(self, name: str) -> Tensor:
        """The masters in the parameter's shape, zero at pruned positions; else like `master`."""
        return self._dense_full(name, self.optimizer_state.full_master)

    def moment(self, name: str, moment: str) -> Tensor:
        """All values of one moment of a tensor, kept entries only; else like `master`."""
        return self._kept_of_full(
            name, lambda tensor: self.optimizer_state.full_moment(tensor, moment)
        )

    def mask(self, name: str) -> Tensor:
        """The flat mask of one tensor, bool on the host; asked for as `master`."""
        tensor = self.by_full_name[name]
        mask_D = torch.zeros(tensor.parameter.numel(), dtype=torch.bool)
        mask_D[tensor.positions()] = True
        return self.gathered(tensor, mask_D).view(-1)

    def _dense_full(self, name: str, values: Callable[[TensorState], Tensor]) -> Tensor:
        """A tensor in its shape, on the host, from its kept values here."""
        tensor = self.by_full_name[name]
        full, values_K = tensor.parameter.numel(), values(tensor)
        if tensor.kept < full:
            dense_D = self._zeros(full)
            tensor.index.scatter(dense_D, values_K.to(dense_D.device), 0)
            values_K = dense_D
        return self.gathered(tensor, values_K.cpu())

    def _kept_of_full(self, name: str, values: Callable[[TensorState], Tensor]) -> Tensor:
        """The kept entries of a tensor, on the host, from the entries here."""
        tensor = self.by_full_name[name]
        if tensor.shard is None:
            return values(tensor).cpu()
        dense_D = self._dense_full(name, values).view(-1)
        return dense_D if tensor.full_kept == tensor.full_numel else dense_D[self.mask(name)]

    def gathered(self, tensor: TensorState, part: Tensor) -> Tensor:
        """A full tensor in its shape, from the shards of all ranks, which call this together."""
        if tensor.shard is None:
            return part.view(tensor.full_shape)
        assert self.group is not None, f"{tensor.name} is sharded"
        return self.group.gather(tensor.shard, part)

    # -- weights of sharded state ------------------------------------------------------

    @property
    def exchanged_weights(self) -> Tensor:
        """A buffer for the kept weights of all owned tensors, in the weights' type: the memory of
        the gradient, which the update no longer needs."""
        dtype = self.owned[0].parameter.dtype if self.owned else self.gradient.dtype
        return self.gradient.view(dtype)[: self.shares.bounds[-1]]

    def collect_weights(self, exchanged: Tensor) -> None:
        """Put the kept weights of this replica's share into a buffer for all, `exchanged`."""
        state = self.optimizer_state
        read = state.read_master if self.gathers else state.read_weight
        for tensor in self.owned:
            share = tensor.entries_in(self.shares.own)
            parts = self.shares.blocks(tensor, self.shares.own)
            if self.backend.launch is not None:
                # Every launch costs, so a GPU gathers all blocks at once. A CPU gathers them one
                # by one, which bounds the memory of a gather.
                parts = iter([(share.start, share.stop)])
            for start, stop in parts:
                weight_K = read(tensor, start, stop)
                if self.gathers:
                    weight_K = precision.round_to(weight_K, exchanged.dtype)
                exchanged[tensor.offset + start : tensor.offset + stop] = weight_K

    def store_weights(self) -> None:
        """Write the kept weights of other replicas' shares from `exchanged_weights` back. Where
        weights are gathered, sparse ones stay there, and no update has written the dense ones."""
        exchanged = self.exchanged_weights
        if self.gathers:
            self.lend_gradient()
        for tensor in self.owned:
            share = tensor.entries_in(self.shares.own)
            parts = [(0, share.start), (share.stop, tensor.kept)]
            if self.gathers:
                parts = [(0, tensor.kept)] if tensor.expanded_at is None else []
            for start, stop in parts:
                weight_K = exchanged[tensor.offset + start : tensor.offset + stop]
                if tensor.expanded_at is None:
                    tensor.index.scatter(tensor.weight_D, weight_K, start)
                else:
                    assert tensor.kept_weight is not None
                    tensor.kept_weight[start:stop] = weight_K

    def note_writes(self) -> None:
        """Note that dense weights and masters agree."""
        for tensor in self.tensors:
            tensor.version = tensor.parameter._version

    def reject_writes(self) -> None:
        """ConfigError for a weight with separate masters that has been written to since
        `note_writes`, in a forward."""
        for tensor in self.tensors:
            has_masters = tensor.parameter.dtype != torch.float32 or self.gathers
            is_own = not has_masters and tensor.expanded_at is None
            if tensor.parameter._version != tensor.version and not is_own:
                raise written_weight(self.name, tensor.full_name)

    def adopt_writes(self, *, is_evaluation: bool = False) -> None:
        """Give masters the values that a program has written to dense weights since `note_writes`,
        such as clipped ones; entries that it has left keep their masters, and pruned ones become
        zero again. ConfigError for a weight that is sparse at rest. An evaluation needs no masters:
        the program may have lent it other weights, such as averaged ones, and put its own back.

        Torch does not count writes to `.data`: the 1st, 2nd, 4th, 8th, … look compares all weights,
        and every look once there was such a write.
        """
        self._looks += not is_evaluation
        looks_at_all = self._looks & (self._looks - 1) == 0 or self._is_written_uncounted
        for tensor in self.tensors:
            is_counted = tensor.parameter._version != tensor.version
            if is_counted and tensor.expanded_at is not None:
                raise ConfigError(
                    f"{tensor.full_name}: a program has written to this weight, which has its "
                    "values only while its layer computes, and the write is lost; set "
                    "samo.weights: dense"
                )
            is_dense = tensor.alias_of is None and tensor.expanded_at is None
            if is_dense and (is_counted or looks_at_all) and self._adopt(tensor, is_evaluation):
                self._is_written_uncounted |= not is_counted
        if not is_evaluation:
            self.note_writes()

    def _adopt(self, tensor: TensorState, is_evaluation: bool) -> bool:
        """`adopt_writes` of one dense weight; returns whether there was a write."""
        weight_D, index, state = tensor.weight_D, tensor.index, self.optimizer_state
        is_written = False
        if tensor.kept < weight_D.numel():
            parts = (index.gather(weight_D, start, stop) for start, stop in tensor.blocks())
            is_written = bool(weight_D.count_nonzero() != sum(p.count_nonzero() for p in parts))
            if is_written:
                self.backend.expand(index, index.gather(weight_D, 0, tensor.kept), weight_D)
        if is_evaluation or state.master_K is None:  # Without masters the weights are these.
            return is_written
        for start, stop in self.shares.blocks(tensor, self.shares.held):
            weight_K = index.gather(weight_D, start, stop)
            master_K = state.read_master(tensor, start, stop)
            is_own = precision.round_to(master_K, weight_K.dtype) == weight_K
            if not is_own.all():
                is_written = True
                values_K = torch.where(is_own, master_K, weight_K.float())
                state.write_master(tensor, start, values_K)
        return is_written

    # -- masks ------------------------------------------------------------------------

    def remask(self, name: str, mask_D: Tensor) -> None:
        """Keep only the kept entries where a flat mask, which is on the host, is True.

        It is True at kept entries only. Entries that stay keep their master weight, moments and
        gradient exactly. The extra memory is one new buffer, and the full old one where it is
        sharded. Called between two steps, by all replicas together; then call `refit` on a layer
        with an alias of this tensor.
        """
        changed = self.by_full_name[name]
        changed.shards_kept = int(mask_D.count_nonzero())
        mask_D, numel = changed.of_full(mask_D), changed.parameter.numel()
        assert mask_D.shape == (numel,), f"{name}: a mask of {mask_D.shape} for {numel} entries"
        new_index = self.backend.index(mask_D, self._index_kind)
        mask_D = mask_D.to(self.backend.device)
        relocation = Relocation(mask_D, changed, self.shares)
        old = self.exchanged_weights if self.has_weights else self.gradient
        changed.own_index = new_index
        self.shares.lay_out()

        self.optimizer_state.relocate(relocation)
        self._lay_gradient(self.accumulator.new_zeros(self.shares.total))
        new = self.exchanged_weights if self.has_weights else self.gradient
        new[: self.shares.bounds[-1]] = relocation.moved(old)
        if self.has_weights:
            self.lend_gradient()
        if self._is_sparse(changed):
            weight_K = None
            if self._stores_weights and changed.kept_weight is not None:
                weight_K = relocation.staying(changed.kept_weight)
            elif self._stores_weights and changed.expanded_at is None:
                weight_K = new_index.gather(changed.weight_D, 0, changed.kept)
            self._make_sparse(changed, weight_K)
        else:
            changed.weight_D.masked_fill_(~mask_D, 0)

    def refit(self) -> None:
        """Lay the gradient out anew, after `remask` of a tensor that this layer has an alias of."""
        for tensor in self.tensors:
            if tensor.expanded_at is None and self._is_sparse(tensor):
                self._make_sparse(tensor)
        weights = self.exchanged_weights
        self.shares.lay_out()
        self._lay_gradient(self._zeros(self.shares.total, self.accumulator.dtype))
        if self.has_weights:
            self.exchanged_weights.copy_(weights)
            self.lend_gradient()

    # -- bytes ------------------------------------------------------------------------

    def live_bytes(self) -> StateBytes:
        """Bytes of all tensors of the state; each storage counts once."""
        return self.optimizer_state.live_bytes() + StateBytes(
            weight=sum(map(self._weight_bytes, self.owned))
            + sum(parameter.nbytes for parameter in self.frozen),
            index=sum(tensor.index.nbytes for tensor in self.owned),
            gradient=self.accumulator.nbytes,
        )

    def _weight_bytes(self, tensor: TensorState) -> int:
        """Bytes of a weight at rest, apart from its masters and the gradient's memory."""
        weight = tensor.parameter if tensor.expanded_at is None else tensor.kept_weight
        is_lent = self.gathers and tensor.expanded_at is not None
        return 0 if weight is None or is_lent else weight.nbytes


def written_weight(layer: str, parameter: str) -> ConfigError:
    """The error of a forward that writes to a parameter of its layer."""
    return ConfigError(
        f"layer {layer}: its forward writes to parameter {parameter!r}, whose masters keep their "
        "values; compute with a changed copy (weight.clamp(…), not clamp_, and no max_norm)"
    )


# -- tied weights, which two layers use, as one stage sees them ----------------------------------


@dataclass(frozen=True)
class Use:
    """One use of a tied weight on this stage."""

    layer: LayerState
    tensor: TensorState

    @property
    def sums(self) -> Tensor:
        return self.layer.sums_of(self.tensor)


@dataclass(frozen=True)
class StageTie:
    """A tie as one stage sees it: both uses, or one use and the pair of stages that hold them."""

    uses: tuple[Use, ...]
    pair: Collective | None
    """Joins the stages of the first and the second use, in order; None if both uses are here."""
