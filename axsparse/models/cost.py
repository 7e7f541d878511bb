"""What a layer costs on one sample, found by running it on the meta device, where nothing is
computed and nothing is stored."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from axsparse.errors import ConfigError
from axsparse.seeds import preserved_rng

SAMPLES = 2
"""Samples of the run: batch normalisation refuses one."""


@dataclass(frozen=True)
class Activations:
    """Bytes that one sample's forward leaves behind, in the type of training."""

    inputs: int
    """What the layer gets from the one before."""
    saved: int
    """What its backward needs beside inputs and weights."""
    outputs: int
    """What goes on to the next layer."""


class Tracer:
    """Runs the layers of a model one after another; each gets what the one before gave."""

    def __init__(self, example: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        """`example`: SAMPLES samples. Floating-point tensors are cast to `dtype`."""
        self._dtype = dtype
        self._flow = tuple(self._on_meta(tensor) for tensor in example)

    def run(self, name: str, module: nn.Module) -> tuple[float, Activations]:
        """Flops of one sample's forward through the next layer, and its activations.

        Counts matrix products, convolutions and attention.
        Raises ConfigError for a layer that does not run there.
        """
        if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module = copy.deepcopy(module)  # it may be somebody's own
        module = module.to(device="meta", dtype=self._dtype).train()
        weights = {_storage(p) for p in (*module.parameters(), *module.buffers())}
        inputs = {_storage(tensor) for tensor in self._flow}
        kept: dict[int, Tensor] = {}  # alive, so that no storage has another's place

        def keep(tensor: Tensor) -> Tensor:
            kept.setdefault(_storage(tensor), tensor)
            return tensor

        before = self._flow
        try:
            with (
                preserved_rng(),
                FlopCounterMode(display=False) as counter,
                saved_tensors_hooks(keep, lambda tensor: tensor),
            ):
                outputs = module(*before)
        except Exception as reason:
            raise ConfigError(
                f"layer {name}: {type(reason).__name__} on the meta device, where its cost is "
                f"found: {' '.join(str(reason).split())}; mend it, or leave Model.example out"
            ) from reason
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        self._flow = tuple(self._on_meta(tensor) for tensor in given)
        saved = {k: v for k, v in kept.items() if k not in weights and k not in inputs}
        own = {_storage(tensor): tensor for tensor in given if _storage(tensor) not in weights}
        activations = Activations(_bytes(before), _bytes(saved.values()), _bytes(own.values()))
        return counter.get_total_flops() / SAMPLES, activations

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.empty_like(tensor, device="meta")
        return torch.empty_like(tensor, device="meta", dtype=self._dtype).requires_grad_()


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of one sample."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors) // SAMPLES
