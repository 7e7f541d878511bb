"""Weights that are sparse at rest: dense in one shared memory, and only while their layer computes.

Between its uses, a sparse weight is what an update needs anyway: the kept entries' fp32 masters and
their index. Before a layer's forward and before its backward, its weights are expanded: the masters
are rounded to the training precision and written to their positions, zeros everywhere else. FSDP2
gathers a layer's shards at the same moments, and frees them after each.

A stage has one `Expansion`, as large as its largest layer, in which every layer replaces the one
before. The parameters of all sparse weights are views of this one storage, so a tensor that
autograd has saved in the forward refers to its weight again as soon as the layer is expanded again.

In ZeRO stage 3 (Rajbhandari et al. 2020) replicas gather kept weights (`LayerGather`) as
soon as the gradient's memory, which has these between two steps, is needed for gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn

from axsparse.runtime.communication import Backoff, Collective, Op, Work, wait
from axsparse.runtime.machine import HeapTrimmer
from axsparse.samo.state_bytes import ALIGNED, GATHERED

if TYPE_CHECKING:
    from axsparse.samo.layer_state import LayerState
    from axsparse.samo.tensor_state import TensorState


class Expansion:
    """The memory of a stage in which the sparse weights of one layer at a time are dense."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, gather: LayerGather | None = None
    ) -> None:
        """`dtype` is the training precision. `gather` brings weights that this replica does not
        have; None if it has all."""
        self.dtype = dtype
        self.gather = gather
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._storage = self._memory.untyped_storage()
        # Layers refer to this object, and are freed with their last reference.
        self._registered: list[ref[LayerState]] = []
        self._layer: LayerState | None = None
        """The layer whose weights the memory has; None if it is free."""
        self._heap = HeapTrimmer() if device.type == "cpu" else None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, and of the buffers of gathers."""
        return self._storage.nbytes() + (0 if self.gather is None else self.gather.nbytes)

    def register(self, layer: LayerState) -> None:
        """Take down a layer; layers come in model order."""
        self._registered.append(ref(layer))

    @property
    def _layers(self) -> list[LayerState]:
        known = [layer() for layer in self._registered]
        return [layer for layer in known if layer is not None]

    def fit_gathers(self) -> None:
        """Size the buffers of gathers for the weights that are sparse now."""
        if self.gather is not None:
            sparse = [
                layer.shares.bounds[-1]
                for layer in self._layers
                if any(tensor.expanded_at is not None for tensor in layer.owned)
            ]
            self.gather.resize(max(sparse, default=0), self._memory)

    def add(self, tensor: TensorState, layer: LayerState) -> None:
        """Give a tensor of a layer its place in the memory, which grows if it has to; the parameter
        becomes a view of it."""
        self.release()
        each = ALIGNED // self.dtype.itemsize
        ends = [
            -(-other.expanded_at.stop // each)
            for other in layer.tensors
            if other.expanded_at is not None
        ]
        begin = max(ends, default=0) * each
        end = begin + tensor.parameter.numel()
        tensor.expanded_at = range(begin, end)
        room = -(-end // each) * ALIGNED
        if room > self._storage.nbytes():
            self._storage.resize_(room)
            self._memory = self._view(0, torch.Size([room // self.dtype.itemsize]))
        put_storage(tensor.parameter, self._view(begin, tensor.parameter.shape))
        tensor.version = tensor.parameter._version

    def _view(self, begin: int, shape: torch.Size) -> Tensor:
        # No view of `_memory`, with which it would share the count of its changes.
        flat = self._memory.new_empty(0).set_(self._storage, begin, [shape.numel()], [1])
        return flat.view(shape)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this memory, so that the next layer overwrites it."""
        begin = self._storage.data_ptr()
        return self._storage.nbytes() > 0 and tensor.untyped_storage().data_ptr() == begin

    @torch.no_grad()
    def expand(self, layer: LayerState) -> None:
        """Make the weights of a layer dense, in the place of another layer's."""
        sources = self._sources(layer)
        if not sources or self._layer is layer:
            return
        self.release()
        if self._heap is not None:  # What layers save lies between blocks that they have freed.
            self._heap.trim()
        for source, tensors in sources.items():
            values_K = self._gathered(source)
            for tensor in tensors:
                assert tensor.expanded_at is not None
                # Not by the parameter: its version would say that a saved weight has been changed.
                dense_D = self._memory[tensor.expanded_at.start : tensor.expanded_at.stop]
                owner = tensor.alias_of or tensor
                if values_K is None:
                    weight_K = source.optimizer_state.at_rest(owner)
                else:
                    weight_K = values_K[owner.offset : owner.offset + owner.kept]
                layer.backend.expand(tensor.index, weight_K, dense_D)
        self._layer = layer

    def _sources(self, layer: LayerState) -> dict[LayerState, list[TensorState]]:
        """The sparse tensors of a layer, by the layer that has their values."""
        sources: dict[LayerState, list[TensorState]] = {}
        for tensor in layer.tensors:
            if tensor.expanded_at is not None:
                owned = tensor.alias_of or tensor
                source = next(one for one in (layer, *self._layers) if owned in one.owned)
                sources.setdefault(source, []).append(tensor)
        return sources

    def _gathered(self, source: LayerState) -> Tensor | None:
        """The kept weights of a layer where they have to be gathered."""
        if not source.gathers or source.has_weights:
            return None
        assert self.gather is not None
        return self.gather.take(source)

    def release(self) -> None:
        """Say that the memory has no layer's weights from here on, since they may change."""
        self._layer = None

    @contextmanager
    def in_use(self, *, is_backward: bool = False) -> Iterator[None]:
        """A block in which the stage's layers are expanded in the order of a forward, or of a
        backward, which puts gradients into their memory; after it none is, also if it fails."""
        with self._passing(reversed(self._layers) if is_backward else self._layers):
            yield
        if is_backward:
            for layer in self._layers:
                layer.reclaim_gradient()

    @contextmanager
    def _passing(self, layers: Iterable[LayerState]) -> Iterator[None]:
        """A block in which these layers are expanded, in this order."""
        gather = self.gather
        try:
            if gather is not None:
                sources = (source for layer in layers for source in self._sources(layer))
                gather.begin(each for each in sources if each.gathers and not each.has_weights)
            yield
            if gather is not None:
                gather.end()
        finally:
            self.release()
            if gather is not None:
                gather.drop()

    @contextmanager
    def expanded(self, layer: LayerState) -> Iterator[None]:
        """A block in which the weights of one layer are dense."""
        if self._layer is layer:
            yield
            return
        with self._passing([layer]):
            self.expand(layer)
            yield


def put_storage(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter the contents of `storage`. It stays the same object, which the module may
    hold elsewhere as well, with its hooks and attributes."""
    if torch._has_compatible_shallow_copy_type(parameter, storage):
        parameter.data = storage
        return
    # The parameter is on the meta device. Autograd's record of its hooks is lost with its old
    # contents.
    new = nn.Parameter(storage, parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)
    if type(new) is not nn.Parameter:  # such as the storage of a device written in Python
        parameter.__class__ = type(new)
        vars(parameter).update(vars(new))
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, kind)
        if hooks:
            setattr(parameter, kind, hooks)


class LayerGather:
    """The gathers of a stage: all replicas ask for the same layers in the same order."""

    def __init__(self, group: Collective, backoff: Backoff) -> None:
        """`group` joins the replicas of the stage, for these gathers alone: the sums of gradients,
        which are under way at the same time, need not have the same place among them."""
        self._group, self._backoff = group, backoff
        self.idle: Callable[[], object] = lambda: None
        """Called while this rank waits for a gather, so that its messages are sent."""
        self.timed: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the waiting."""
        self._buffers: list[Tensor] = []
        self._begun = 0
        self._coming: deque[LayerState] = deque()
        """The layers of this pass whose gathers have not begun, in order."""
        self._under_way: deque[tuple[LayerState, Tensor, Work]] = deque()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other replicas since the start."""
        return self._group.bytes_sent

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def resize(self, entries: int, like: Tensor) -> None:
        """Size the buffers for layers of at most `entries` kept entries, as tensors like `like`."""
        if not self._buffers or self._buffers[0].numel() != entries:
            self._buffers.clear()
            self._buffers += [like.new_empty(entries) for _ in range(GATHERED)]

    def begin(self, layers: Iterable[LayerState]) -> None:
        """Open a pass, which needs the weights of these layers in this order."""
        assert not self._coming and not self._under_way, "one pass at a time"
        self._coming.extend(layers)
        self._start_next()

    def take(self, layer: LayerState) -> Tensor:
        """The kept weights of all owned tensors of a layer, once they have arrived; they stay until
        another layer is asked for. Layers of the pass that come before it are left out."""
        while True:
            assert self._under_way, f"{layer.name} is not expected in this pass"
            gathered, buffer, work = self._under_way.popleft()
            if not work.poll():
                with self.timed():
                    wait(work, self._backoff, self.idle)
            self._start_next()
            if gathered is layer:
                return buffer

    def end(self) -> None:
        """Close the pass: replicas that have left out layers gather these all the same."""
        while self._under_way:
            self.take(self._under_way[-1][0])

    def drop(self) -> None:
        """Forget the pass, after an error."""
        self._coming.clear()
        self._under_way.clear()

    @torch.no_grad()
    def _start_next(self) -> None:
        if not self._coming:
            return
        layer = self._coming.popleft()
        bounds = layer.shares.bounds
        buffer = self._buffers[self._begun % GATHERED][: bounds[-1]]
        self._begun += 1
        layer.collect_weights(buffer)
        self._under_way.append((layer, buffer, self._group.start(Op.ALL_GATHER, buffer, bounds)))
