"""Draws masks from what each layer gets as input, one layer at a time, before state is built.

Calibration samples pass through the stages once. A stage has its samples' activations and one
layer: it runs the layer on all samples to gather statistics, draws the masks of its matrices, and
runs it again with these pruned to make the inputs of the next layer. The last activations of a
stage travel to the next one. Every replica does the same by itself, so that masks depend neither
on the number of stages nor on that of replicas.

Wanda (Sun et al. 2023) keeps, of every row of a matrix, the entries of largest

    |weight[i, j]| · √(Σ x[j]²)

with the sum over all tokens of all samples that pass through the matrix as inputs x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from axsparse.models.layer import Layer, as_tuple, on_meta
from axsparse.pruning.pattern import n_of_m
from axsparse.pruning.targets import Targets
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.communication import Direction, Link, Message, Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Place
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Bits
from axsparse.samo.shards import ALONE

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class CalibratedMasks:
    """The masks of this stage's matrices, in one bit an entry."""

    kept: Mapping[str, int]
    """Of the matrices of all stages."""
    bits: dict[str, Bits] = field(default_factory=dict)

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        del weight
        assert within is None and self.bits[name].numel == torch.Size(shape).numel(), name
        return self.bits[name].mask()


@dataclass(frozen=True)
class Calibration:
    """What decides the masks, and the stage that this rank is."""

    targets: Targets
    pattern: tuple[int, int] | None
    """The numbers of `pruning.pattern`, which then replaces sparsities."""
    layers: Sequence[Layer]
    """The layers of this stage."""
    ties: Mapping[str, str]
    options: StateOptions
    place: Place
    transport: Transport

    def check(self) -> None:
        """ConfigError for a matrix of this stage whose inputs no linear layer sees, or two see."""
        twice = {*self.ties, *self.ties.values()} & {*self.targets.shapes}
        if twice:
            raise ConfigError(
                f"pruning.method: wanda scores a matrix by the inputs of its layer, and "
                f"{min(twice)} is used in two; name it in pruning.exclude"
            )
        for layer in self.layers:
            module = layer.build() if layer.init is None else on_meta(layer)
            linear = _linear_weights(layer.name, module)
            for parameter, _ in module.named_parameters():
                name = f"{layer.name}.{parameter}"
                if name in self.targets.shapes and name not in linear:
                    raise ConfigError(
                        f"pruning.method: wanda scores a matrix by the inputs of a linear layer, "
                        f"and {name} is of none; name it in pruning.exclude"
                    )

    def draw(self, samples: Sequence[Tensors]) -> CalibratedMasks:
        """The masks; all ranks call this together. `samples` has a tuple of inputs of the first
        layer for each microbatch, on stages behind the first an empty tuple."""
        masks = CalibratedMasks(
            {name: self._kept(name, shape) for name, shape in self.targets.shapes.items()}
        )
        branch = self.transport.branch()
        link = branch.link(self.place)
        flow = [self._prepared(inputs) for inputs in samples]
        if not self.place.is_first:
            flow = self._received(link, len(samples))
        with torch.no_grad():
            for layer in self.layers:
                self._pass(layer, flow, masks)
        if not self.place.is_last:
            for number, tensors in enumerate(flow):
                link.send(Message(Direction.FORWARD, number, tensors))
        branch.close()  # and its link, once all is sent
        return masks

    def _pass(self, layer: Layer, flow: list[Tensors], masks: CalibratedMasks) -> None:
        """Draw the masks of one layer, and replace its inputs in `flow` by its outputs."""
        options = replace(self.options, masks=None, moments=(), replicas=ALONE)
        [built] = build_layers([layer], self.ties, options)
        module = built.module.eval()
        wanted = {
            name: linear
            for name, linear in _linear_weights(layer.name, module).items()
            if name in self.targets.shapes
        }
        with _squares(wanted) as sums:
            if wanted:
                for inputs in flow:
                    module(*inputs)
        for name, linear in wanted.items():
            weight = _fp32(built, name)
            score = weight.abs() * sums[name].sqrt().cpu()
            mask = self._mask(name, score)
            masks.bits[name] = Bits(_packed(mask), mask.numel())
            linear.weight.masked_fill_(~mask.to(linear.weight.device), 0.0)
        for number, inputs in enumerate(flow):
            flow[number] = tuple(map(canonical, as_tuple(layer.name, module(*inputs))))

    def _kept(self, name: str, shape: Shape) -> int:
        if self.pattern is not None:
            n, m = self.pattern
            return shape[0] * shape[1] // m * n
        return shape[0] * self._kept_of_row(name, shape)

    def _kept_of_row(self, name: str, shape: Shape) -> int:
        sparsity = self.targets.own.get(name, self.targets.sparsity)
        return shape[1] - int(shape[1] * sparsity)

    def _mask(self, name: str, score: Tensor) -> Tensor:
        """The bool mask of the highest scores of each row; of equal ones, the later ones."""
        if self.pattern is not None:
            return n_of_m(score, *self.pattern)
        removed = score.shape[1] - self._kept_of_row(name, tuple(score.shape))
        order = score.sort(dim=1, stable=True).indices
        mask = torch.ones(score.shape, dtype=torch.bool)
        return mask.scatter_(1, order[:, :removed], False)

    def _prepared(self, inputs: Tensors) -> Tensors:
        """Inputs of the first layer on its device, floating-point ones in the run's precision."""
        device, dtype = self.options.backend.device, self.options.dtype
        return tuple(
            tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            for tensor in inputs
        )

    def _received(self, link: Link, count: int) -> list[Tensors]:
        """What the stage before sends, a message for each microbatch."""
        flow: list[Tensors] = []
        backoff = self.transport.backoff
        backoff.reset()
        while len(flow) < count:
            for message in link.arrivals():
                flow.append(tuple(tensor for tensor in message.tensors if tensor is not None))
                backoff.reset()
            if len(flow) < count:
                backoff.pause()
        return flow


def _linear_weights(layer: str, module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers within a layer, by the global names of their weights."""
    return {
        ".".join(part for part in (layer, path, "weight") if part): child
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }


@contextmanager
def _squares(modules: Mapping[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """While it lasts, the sums of squares of each module's inputs are gathered in fp32."""
    sums = {
        name: torch.zeros(linear.in_features, device=linear.weight.device)
        for name, linear in modules.items()
    }

    def hook(name: str, x: Tensor) -> None:
        sums[name] += x.float().reshape(-1, x.shape[-1]).square().sum(0)

    handles = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: hook(name, inputs[0]))
        for name, linear in modules.items()
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def _fp32(built: BuiltLayer, name: str) -> Tensor:
    """The fp32 weights of a layer's matrix, on the host."""
    return built.state.dense_master(name).cpu()


def _packed(mask: Tensor) -> NDArray[np.uint8]:
    return np.packbits(mask.view(-1).numpy())
