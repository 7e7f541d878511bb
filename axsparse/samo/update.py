"""The optimizer step over compressed state, block by block.

Upcast, scale, update, downcast and write-back touch one block of kept entries at a
time, so that the step needs no memory beyond a few blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from axsparse.samo.optimizer import Block, Hyper, Optimizer
from axsparse.samo.state import LayerState, TensorState


def update(
    layers: Iterable[LayerState], optimizer: Optimizer, hyper: Hyper, gradient_factor: float
) -> None:
    """One update of all owned tensors, and their dense weights with them.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale).
    `hyper.weight_decay` applies to the tensors that decay.
    """
    undecayed = replace(hyper, weight_decay=0.0)
    for layer in layers:
        for tensor in layer.owned:
            _update_tensor(
                layer, tensor, optimizer, hyper if tensor.decays else undecayed, gradient_factor
            )


def _update_tensor(
    layer: LayerState,
    tensor: TensorState,
    optimizer: Optimizer,
    hyper: Hyper,
    gradient_factor: float,
) -> None:
    gradient_K = layer.gradient_of(tensor)

    def read(start: int, stop: int) -> Block:
        return Block(
            grad=gradient_K[start:stop].float().mul(gradient_factor),
            master=layer.read_master(tensor, start, stop),
            moments=layer.moments_of(tensor, start, stop),
        )

    def apply(start: int, block: Block) -> None:
        optimizer.apply(block, statistics, hyper)
        layer.write_master(tensor, start, block.master)

    statistics: Tensor | None = None
    for start, stop in tensor.blocks():
        block = read(start, stop)
        optimizer.update_moments(block, hyper)
        if optimizer.statistics is None:
            # Elementwise rules go on at once, while the block is in the cache.
            apply(start, block)
        else:
            part = optimizer.statistics(block, hyper)
            statistics = part if statistics is None else statistics + part
    if optimizer.statistics is not None:
        for start, stop in tensor.blocks():
            apply(start, read(start, stop))
