"""The optimizer step over compressed state, block by block.

Upcast, scale, update, downcast and write-back touch one block of kept entries at a
time, so that the step needs no memory beyond a few blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from axsparse.samo.optimizer import Hyper, Optimizer
from axsparse.samo.state import LayerState, TensorState


def update(
    layers: Iterable[LayerState], optimizer: Optimizer, hyper: Hyper, gradient_factor: float
) -> None:
    """One update of all owned tensors, and their dense weights with them.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale).
    `hyper.weight_decay` applies to the tensors that decay.
    """
    undecayed = Hyper(hyper.step, hyper.learning_rate, hyper.betas, hyper.eps, weight_decay=0.0)
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
    statistics: Tensor | None = None
    for start, stop in tensor.blocks():
        gradient = gradient_K[start:stop].float().mul(gradient_factor)
        moments = layer.moments_of(tensor, start, stop)
        optimizer.update_moments(gradient, moments, hyper)
        if optimizer.statistics is None:
            # Elementwise rules go on at once, while the block is in the cache.
            master = layer.read_master(tensor, start, stop)
            optimizer.apply(master, moments, None, hyper)
            layer.write_master(tensor, start, master)
        else:
            master = layer.read_master(tensor, start, stop)
            part = optimizer.statistics(master, moments, hyper)
            statistics = part if statistics is None else statistics + part
    if optimizer.statistics is not None:
        for start, stop in tensor.blocks():
            master = layer.read_master(tensor, start, stop)
            optimizer.apply(master, layer.moments_of(tensor, start, stop), statistics, hyper)
            layer.write_master(tensor, start, master)
