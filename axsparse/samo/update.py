"""The optimizer step over compressed state, block by block.

Upcast, scale, update, downcast and write-back touch one block of kept entries at a
time, so that the step needs no memory beyond a few blocks. Where the state is sharded
over replicas, each updates what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from axsparse.comm import Op
from axsparse.samo.cuda.helpers import DeviceIndex
from axsparse.samo.cuda.step import Slot
from axsparse.samo.optimizer import Block, Hyper, Optimizer
from axsparse.samo.shards import ALONE, BLOCK, Replicas
from axsparse.samo.state import LayerState
from axsparse.samo.tensor import TensorState, common


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
        for tensor in layer.owned:
            # Elementwise rules do all at once, while the block is in the cache.
            step.apply(layer, tensor, statistics.get(tensor.name))
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

    def apply(self, layer: LayerState, tensor: TensorState, statistics: Tensor | None) -> None:
        hyper = self.hyper_of(tensor)
        fused = self.optimizer.fused
        if layer.backend.launch is not None and fused is not None:
            fused(_slot(layer, tensor), hyper, self.gradient_factor)
            return
        for start, stop in layer.blocks(tensor, layer.held):
            block = self.read(layer, tensor, start, stop)
            if statistics is None:
                self.optimizer.update_moments(block, hyper)
            self.optimizer.apply(block, statistics, hyper)
            layer.write_master(tensor, start, block.master)


def _slot(layer: LayerState, tensor: TensorState) -> Slot:
    """A tensor as kernels take it: what is held here, on its device."""
    held = common(layer.held, tensor)
    master_K, index = layer.master_K, tensor.index
    assert isinstance(index, DeviceIndex), "a kernel's index is on its device"
    return Slot(
        index,
        tensor.weight_D,
        layer.gradient_of(tensor),
        None if master_K is None else master_K[layer.held_slice(tensor, held.start, held.stop)],
        tuple(layer.moments_of(tensor, held.start, held.stop).values()),
        held,
    )
