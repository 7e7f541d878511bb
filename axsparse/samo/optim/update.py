"""The norm of all gradients, and the step over compressed state by an optimizer.

Gradients are converted to fp32 and scaled, masters updated, rounded and written to the dense
weights. A GPU's kernels and a CPU's compiled loops do that in one pass; elsewhere torch's
operations do it, one block of kept entries at a time, so that the step needs no memory beyond a few
blocks. Where the state is sharded over replicas, each replica updates the entries that it holds.

The norm is made of partial sums over blocks of entries, which no layout changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from axsparse.config.schema import OptimizerConfig
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import ConfigError
from axsparse.samo.cuda import kernels
from axsparse.samo.cuda.kernels import sum_squares
from axsparse.samo.host import host_step
from axsparse.samo.host.compiled_loops import FEW, can_compile
from axsparse.samo.host.host_step import sum_of_squares
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Hyper, Optimizer, StateBlock, TensorSlot
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.shards import BLOCK
from axsparse.samo.tensor_state import TensorState


def norm_partials(layers: Iterable[LayerState], names: Iterable[str]) -> dict[str, Tensor]:
    """By tensor name, one fp64 sum of squares for each block of kept gradient entries, `(blocks,)`,
    on the device of the gradients; zero for the blocks of other replicas' shares.

    A sum is non-finite exactly if a gradient entry of its block is: squares of fp32 values cannot
    overflow fp64. Only tensors in `names` are counted, and of tied weights the first use. On a GPU
    few kernels sum all tensors together, since most of them are small.
    """
    chosen = set(names)
    counted = [(layer, t) for layer in layers for t in layer.owned if t.name in chosen]
    if not counted:
        return {}
    backend = counted[0][0].backend
    sizes = [-(-tensor.kept // BLOCK) for _, tensor in counted]
    room = torch.zeros(sum(sizes), dtype=torch.float64, device=backend.device).split(sizes)
    parts: list[tuple[Tensor, Tensor]] = []
    for (layer, tensor), sums in zip(counted, room, strict=True):
        gradient_K, shares = layer.gradient_of(tensor), layer.shares
        if backend.launch is None:
            for start, stop in shares.blocks(tensor, shares.own):
                sums[start // BLOCK] = sum_of_squares(gradient_K[start:stop])
        elif own := tensor.entries_in(shares.own):
            blocks = sums[own.start // BLOCK : -(-own.stop // BLOCK)]
            parts.append((gradient_K[own.start : own.stop], blocks))
    if backend.launch is not None:
        sum_squares(backend.launch, parts)
    return {tensor.name: sums for (_, tensor), sums in zip(counted, room, strict=True)}


def global_norm(partials: Tensor, loss_scale: float = 1.0) -> float:
    """The norm from all partials in (name, block) order, rounded to fp32 before any use."""
    norm = math.sqrt(float(partials.sum())) / loss_scale
    return float(torch.tensor(norm, dtype=torch.float32))


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor that clips gradients: min(1, clip_norm / (norm + 1e-6)) in fp32, as in
    `torch.nn.utils.clip_grad_norm_`; 1 if `clip_norm` is 0."""
    if clip_norm == 0:
        return 1.0
    limit = torch.tensor(clip_norm, dtype=torch.float32)
    factor = limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(factor, max=1.0))


def optimizer_of(settings: OptimizerConfig) -> Optimizer:
    """The optimizer of a configuration."""
    if settings.name == "sgd":
        return sgd(settings.momentum, nesterov=settings.nesterov)
    return {"adamw": ADAMW, "lamb": LAMB}[settings.name]


NONE: Mapping[str, Hyper] = {}
FullTensorStep: TypeAlias = Callable[[Sequence[TensorSlot], Hyper, float], None]
"""The full step of some tensors, in place: slots, settings, and the factor of all gradients."""


# Reason: the arguments of every update come first; the rest is for some kinds of state only.
def update(
    layers: Sequence[LayerState],
    optimizer: Optimizer,
    hyper: Hyper,
    gradient_factor: float,
    *,
    own: Mapping[str, Hyper] = NONE,
    updated: Callable[[LayerState], None] | None = None,
    staged_layers: Callable[[Sequence[LayerState]], Iterable[LayerState]] = iter,
) -> None:
    """Update the masters, moments and dense weights of all owned tensors once.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale).
    `hyper.weight_decay` applies to the tensors that decay; tensors that `own` names have the
    settings given there instead, as they are. `updated(layer)` is called as soon as all that this
    replica holds of a layer is updated. `staged_layers` goes through the layers in order and has
    each one's masters and moments on its device until the next one is asked for.
    All replicas call this together if their state is sharded.
    """
    at_once = full_tensor_step(layers, optimizer)
    step = _Step(optimizer, hyper, own, gradient_factor, at_once)
    statistics = step.statistics(layers, staged_layers)
    for layer in staged_layers(layers):
        step.apply(layer, statistics)
        if updated is not None:
            updated(layer)


@dataclass(frozen=True)
class _Step:
    """One step of one optimizer, for any tensors of some layers; the arguments of `update`."""

    optimizer: Optimizer
    hyper: Hyper
    own: Mapping[str, Hyper]
    gradient_factor: float
    at_once: FullTensorStep | None

    def hyper_of(self, tensor: TensorState) -> Hyper:
        usual = self.hyper if tensor.decays else replace(self.hyper, weight_decay=0.0)
        hyper = self.own.get(tensor.full_name, usual)
        # As in torch, the steps of a parameter count from its first gradient.
        return replace(hyper, step=hyper.step - tensor.begun) if tensor.begun else hyper

    def read(self, layer: LayerState, tensor: TensorState, start: int, stop: int) -> StateBlock:
        gradient_K = layer.gradient_of(tensor)[start:stop]
        return StateBlock(
            grad=gradient_K.float().mul(self.gradient_factor),
            master=layer.optimizer_state.read_master(tensor, start, stop),
            moments=layer.optimizer_state.moments_of(tensor, start, stop),
        )

    def statistics(
        self,
        layers: Sequence[LayerState],
        staged_layers: Callable[[Sequence[LayerState]], Iterable[LayerState]],
    ) -> dict[str, Tensor]:
        """The sums over full tensors that the rule needs, by name of tensor or shard; empty if it
        needs none. Updates all moments on the way.

        Every block has one owner, blocks are added in order, and then the shards of a tensor; so
        the sums are the same bits however replicas share the state.
        """
        optimizer = self.optimizer
        if optimizer.statistics is None:
            return {}
        tensors = [tensor for layer in layers for tensor in layer.owned]
        numbers = [-(-tensor.kept // BLOCK) for tensor in tensors]
        size, device = (sum(numbers), optimizer.num_statistics), layers[0].backend.device
        parts = torch.zeros(size, dtype=torch.float64, device=device)
        each = dict(zip((t.name for t in tensors), parts.split(numbers), strict=True))
        for layer in staged_layers(layers):
            for tensor in layer.owned:
                for start, stop in layer.shares.blocks(tensor, layer.shares.held):
                    block = self.read(layer, tensor, start, stop)
                    change("update_moments", optimizer.update_moments, block, self.hyper_of(tensor))
                    part = optimizer.statistics(block, self.hyper_of(tensor))
                    each[tensor.name][start // BLOCK] = part
        replicas = layers[0].shares.replicas
        if replicas.shard:
            replicas.exchange(Op.ALL_REDUCE, parts.view(-1))
        each = dict(zip(each, parts.cpu().split(numbers), strict=True))
        sums = {name: blocks.sum(0) for name, blocks in each.items()}
        shards = [tensor.name for tensor in tensors if tensor.shard is not None]
        group = layers[0].group
        if shards and group is not None:
            own = torch.stack([sums[name] for name in shards])
            total = torch.zeros_like(own)
            for row in group.gather_rows(own.view(-1)):
                total += row.view_as(own)
            sums.update(zip(shards, total, strict=True))
        return sums

    def apply(self, layer: LayerState, statistics: Mapping[str, Tensor]) -> None:
        if self.at_once is not None:
            alike: dict[Hyper, list[TensorState]] = {}
            for tensor in layer.owned:
                alike.setdefault(self.hyper_of(tensor), []).append(tensor)
            for hyper, tensors in alike.items():
                self.at_once(list(_slots(layer, tensors)), hyper, self.gradient_factor)
            return
        for tensor in layer.owned:
            self.apply_in_blocks(layer, tensor, statistics.get(tensor.name))

    def apply_in_blocks(
        self, layer: LayerState, tensor: TensorState, statistics: Tensor | None
    ) -> None:
        """Update one tensor. Without statistics the moments are updated here, while the block is in
        the cache; with them they are updated already."""
        hyper = self.hyper_of(tensor)
        for start, stop in layer.shares.blocks(tensor, layer.shares.held):
            block = self.read(layer, tensor, start, stop)
            if statistics is None:
                change("update_moments", self.optimizer.update_moments, block, hyper)
            change("apply", self.optimizer.apply, block, statistics, hyper)
            layer.optimizer_state.write_master(tensor, start, block.master)


def change(name: str, function: Callable[..., object], *arguments: object) -> None:
    """Call a function of an optimizer; ConfigError if it returned values that it should have
    written."""
    result = function(*arguments)
    if result is not None:
        raise ConfigError(
            f"optimizer: {name} returned {type(result).__name__}, of which nothing is done; "
            "change the tensors of the block in place, and return nothing"
        )


def full_tensor_step(layers: Sequence[LayerState], optimizer: Optimizer) -> FullTensorStep | None:
    """The function that updates full tensors of these layers: kernels on a GPU, and compiled loops
    on a CPU where some tensor is large enough to be worth compiling; None if there are neither.
    """
    if not layers or optimizer.compiled is None:
        return None
    backend = layers[0].backend
    if backend.launch is not None:
        return partial(kernels.step, optimizer)
    is_large = any(tensor.kept > FEW for layer in layers for tensor in layer.owned)
    return partial(host_step.step, optimizer) if is_large and can_compile() else None


def _slots(layer: LayerState, tensors: Iterable[TensorState]) -> Iterator[TensorSlot]:
    """The tensors of which this replica updates some entries, as kernels and loops take them."""
    shares, state = layer.shares, layer.optimizer_state
    master_K, moments_K = state.master_K, state.moments_K.values()
    for tensor in tensors:
        held = tensor.entries_in(shares.held)
        if held:
            part = shares.shard_slice(tensor, held.start, held.stop)
            master = None if master_K is None else master_K[part]
            index, gradient_K = tensor.index, layer.gradient_of(tensor)
            if layer.gathers:
                # The held masters, like a small fp32 tensor; gathers round and distribute them.
                assert master is not None
                index, gradient_K = layer.backend.full_index(len(held)), gradient_K[held.start :]
                held, weight, master = range(len(held)), master, None
            elif tensor.expanded_at is None:
                weight = tensor.weight_D
            else:
                # Kept entries alone, like a small dense tensor. Masters from which the weight is
                # rounded when it is expanded are an fp32 weight that is its own master.
                index = layer.backend.full_index(tensor.kept)
                if tensor.kept_weight is not None:
                    weight = tensor.kept_weight
                else:
                    assert master is not None
                    weight, master = master, None
            yield TensorSlot(
                index,
                weight,
                gradient_K[: index.kept],
                master,
                tuple(values_K[part] for values_K in moments_K),
                held,
            )
