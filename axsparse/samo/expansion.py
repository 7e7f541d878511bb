"""Weights that are sparse at rest: dense in one shared memory, and only while their layer computes.

Between its uses, a sparse weight is what an update needs anyway: the kept entries' fp32 masters and
their index. Before a layer's forward and before its backward, its weights are expanded: the masters
are rounded to the training precision and written to their positions, zeros everywhere else. FSDP2
gathers a layer's shards at the same moments, and frees them after each.

A stage has one `Expansion`, as large as its largest layer, in which every layer replaces the one
before. The parameters of all sparse weights are views of this one storage, so a tensor that
autograd has saved in the forward refers to its weight again as soon as the layer is expanded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from axsparse.samo.state_bytes import ALIGNED

if TYPE_CHECKING:
    from axsparse.samo.layer_state import LayerState, OptimizerState
    from axsparse.samo.tensor_state import TensorState


class Expansion:
    """The memory of a stage in which the sparse weights of one layer at a time are dense."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the training precision."""
        self.dtype = dtype
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._storage = self._memory.untyped_storage()
        self._states: dict[TensorState, OptimizerState] = {}
        """By owned tensor, the state that has its values."""
        self._layer: LayerState | None = None
        """The layer whose weights the memory has; None if it is free."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._storage.nbytes()

    def register(self, layer: LayerState) -> None:
        """Take down where the values of a layer's weights are."""
        self._states.update(dict.fromkeys(layer.owned, layer.optimizer_state))

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
        if room > self.nbytes:
            self._storage.resize_(room)
            self._memory = self._view(0, torch.Size([room // self.dtype.itemsize]))
        put_storage(tensor.parameter, self._view(begin, tensor.parameter.shape))

    def _view(self, begin: int, shape: torch.Size) -> Tensor:
        # No view of `_memory`, with which it would share the count of its changes.
        flat = self._memory.new_empty(0).set_(self._storage, begin, [shape.numel()], [1])
        return flat.view(shape)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this memory, so that the next layer overwrites it."""
        return self.nbytes > 0 and tensor.untyped_storage().data_ptr() == self._storage.data_ptr()

    @torch.no_grad()
    def expand(self, layer: LayerState) -> None:
        """Make the weights of a layer dense, in the place of another layer's."""
        sparse = [tensor for tensor in layer.tensors if tensor.expanded_at is not None]
        if not sparse or self._layer is layer:
            return
        self.release()
        for tensor in sparse:
            assert tensor.expanded_at is not None
            # Not by the parameter: its version would say that a saved weight has been changed.
            dense_D = self._memory[tensor.expanded_at.start : tensor.expanded_at.stop]
            owner = tensor.alias_of or tensor
            layer.backend.expand(tensor.index, self._states[owner].at_rest(owner), dense_D)
        self._layer = layer

    def release(self) -> None:
        """Say that the memory has no layer's weights from here on, since they may change."""
        self._layer = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which layers are expanded; after it none is, also if it fails."""
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def expanded(self, layer: LayerState) -> Iterator[None]:
        """A block in which the weights of one layer are dense."""
        if self._layer is layer:
            yield
            return
        with self.in_use():
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
    if type(new) is not type(parameter):  # such as the storage of a device written in Python
        parameter.__class__ = type(new)
        vars(parameter).update(vars(new))
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, kind)
        if hooks:
            setattr(parameter, kind, hooks)
