"""The optimizer step over compressed state, block by block.

Upcast, scale, update, downcast and write-back touch one block of kept entries at a
time, so that the step needs no memory beyond a few blocks. Where the state is sharded
over replicas, each updates what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from axsparse.runtime.communication import Op
from axsparse.samo.cuda.device_index import DeviceIndex
from axsparse.samo.cuda.step_kernel import TensorSlot
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.optimizer import Block, Optimizer
from axsparse.samo.shards import ALONE, BLOCK, Replicas
from axsparse.samo.tensor_state import TensorState, common


def update(
    layers: Sequence[LayerState],
    optimizer: Optimizer,
    hyper: Hyper,
    gradient_factor: float,
    *,
    replicas: Replicas = ALONE,
    updated: Callable[[LayerState], None] | None = None,
    visits: Callable[[Sequence[LayerState]], Iterable[LayerState]] = iter,
) -> None:
    """One update of all owned tensors, and their dense weights with them.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale).
    `hyper.weight_decay` applies to the tensors that decay. `updated(layer)` is called as
    soon as all that this replica holds of a layer is done. `visits` goes through the layers, each
    of which has its masters and moments where it is updated until the next one comes.
    """
    step = _Step(optimizer, hyper, replace(hyper, weight_decay=0.0), gradient_factor)
    statistics = step.statistics(layers, replicas, visits)
    for layer in visits(layers):
        step.apply(layer, statistics)
        if updated is not None:
            updated(layer)


@dataclass(frozen=True)
class _Step:
    optimizer: Optimizer
    hyper: Hyper
    undecayed: Hyper
    gradient_factor: float

    def hyper_of(self, tensor: TensorState) -> Hyper:
        return self.hyper if tensor.decays else self.undecayed

    def read(self, layer: LayerState, tensor: TensorState, start: int, stop: int) -> Block:
        gradient_K = layer.gradient_of(tensor)[start:stop]
        return Block(
            grad=gradient_K.float().mul(self.gradient_factor),
            master=layer.read_master(tensor, start, stop),
            moments=layer.moments_of(tensor, start, stop),
        )

    def statistics(
        self,
        layers: Sequence[LayerState],
        replicas: Replicas,
        visits: Callable[[Sequence[LayerState]], Iterable[LayerState]],
    ) -> dict[str, Tensor]:
        """Update the moments first where a rule needs sums over whole tensors, and sum.

        Every block's part has one owner and is added in block order, so the sums are the
        same bits however the state is sharded.
        """
        optimizer = self.optimizer
        if optimizer.statistics is None:
            return {}
        tensors = [tensor for layer in layers for tensor in layer.owned]
        numbers = [-(-tensor.kept // BLOCK) for tensor in tensors]
        size, device = (sum(numbers), optimizer.num_statistics), layers[0].backend.device
        parts = torch.zeros(size, dtype=torch.float64, device=device)
        each = dict(zip((t.name for t in tensors), parts.split(numbers), strict=True))
        for layer in visits(layers):
            for tensor in layer.owned:
                for start, stop in layer.blocks(tensor, layer.held):
                    block = self.read(layer, tensor, start, stop)
                    optimizer.update_moments(block, self.hyper_of(tensor))
                    part = optimizer.statistics(block, self.hyper_of(tensor))
                    each[tensor.name][start // BLOCK] = part
        if replicas.shard:
            replicas.exchange(Op.ALL_REDUCE, parts.view(-1))
        each = dict(zip(each, parts.cpu().split(numbers), strict=True))
        return {name: blocks.sum(0) for name, blocks in each.items()}

    def apply(self, layer: LayerState, statistics: Mapping[str, Tensor]) -> None:
        fused = self.optimizer.fused
        if layer.backend.launch is not None and fused is not None:
            for hyper in (self.hyper, self.undecayed):
                own = [tensor for tensor in layer.owned if self.hyper_of(tensor) is hyper]
                fused(list(_slots(layer, own)), hyper, self.gradient_factor)
            return
        for tensor in layer.owned:
            self.apply_in_blocks(layer, tensor, statistics.get(tensor.name))

    def apply_in_blocks(
        self, layer: LayerState, tensor: TensorState, statistics: Tensor | None
    ) -> None:
        """Elementwise rules do all at once, while the block is in the cache."""
        hyper = self.hyper_of(tensor)
        for start, stop in layer.blocks(tensor, layer.held):
            block = self.read(layer, tensor, start, stop)
            if statistics is None:
                self.optimizer.update_moments(block, hyper)
            self.optimizer.apply(block, statistics, hyper)
            layer.write_master(tensor, start, block.master)


def _slots(layer: LayerState, tensors: Iterable[TensorState]) -> Iterator[TensorSlot]:
    """Tensors as kernels take them: those of which something is held here, on its device."""
    held, master_K, moments_K = layer.held, layer.master_K, layer.moments_K.values()
    for tensor in tensors:
        own, index = common(held, tensor), tensor.index
        assert isinstance(index, DeviceIndex), "a kernel's index is on its device"
        if own:
            part = layer.held_slice(tensor, own.start, own.stop)
            yield TensorSlot(
                index,
                tensor.weight_D,
                layer.gradient_of(tensor),
                None if master_K is None else master_K[part],
                tuple(values_K[part] for values_K in moments_K),
                own,
            )
