"""Layers built straight into their final storage, one parameter at a time.

A parameter is initialised in fp32, pruned, compressed and rounded before the next one
exists, so building a stage needs memory for its final state and one fp32 parameter only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from axsparse.models.layer import (
    Layer,
    LayerSharding,
    StartValues,
    Ties,
    mismatched_values,
    on_meta,
)
from axsparse.models.module_buffers import slots
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.seeds import keyed_generator, preserved_rng, seed_all
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.expansion import Expansion, put_storage
from axsparse.samo.layer_state import LayerState
from axsparse.samo.masks import Masks, Weight
from axsparse.samo.shards import ALONE, Replicas
from axsparse.samo.state_bytes import StateFormat
from axsparse.samo.tensor_state import TensorState


@dataclass(frozen=True)
class BuiltLayer:
    """A layer of this stage: its module and the state of its trained parameters."""

    spec: Layer
    module: nn.Module
    state: LayerState
    frozen_masks: dict[str, Tensor] = field(default_factory=dict)
    """The packed masks of frozen parameters that were pruned while they were trained, by global
    name."""

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank answers for, with global names: shards, and on the first of
        several tensor-parallel ranks also the replicated ones. Sparse weights are dense until the
        next one is asked for."""
        shards = {id(t.parameter): t.name for t in self.state.tensors if t.shard is not None}
        is_first = self.state.group is None or self.state.group.rank == 0
        with self.state.expanded():
            for name, parameter in self.module.named_parameters():
                if id(parameter) in shards:
                    yield shards[id(parameter)], parameter
                elif is_first:
                    yield self.spec.full_name(name), parameter


@dataclass(frozen=True)
class StateOptions:
    """How the layers of a stage are built; equal on all ranks but for `replicas` and `backend`."""

    stored: StateFormat
    seed: int
    """Seeds the generators of start values."""
    masks: Masks | None
    """Which entries are kept from the start; None builds dense state."""
    replicas: Replicas = ALONE
    """The ranks that hold the same layers."""
    sharding: LayerSharding | None = None
    """How tensor-parallel ranks share the layers; None if this rank has all of them."""
    start: StartValues | None = None
    """The values that the model starts from; None leaves that to its layers."""
    backend: Backend = HOST
    """The device of the state, and its compute functions."""
    expansion: Expansion | None = None
    """Where weights that are sparse at rest are expanded; None keeps all weights dense."""


def build_layers(layers: Sequence[Layer], ties: Ties, options: StateOptions) -> list[BuiltLayer]:
    """Build the layers of one stage.

    Both uses of a tied weight start, and are pruned, as one; where both are in `layers`, they share
    one storage. Raises ConfigError where an `init` gives no tensor of the right shape, or a
    buffer has no contents.
    """
    tensors: dict[str, TensorState] = {}
    frozen: dict[str, nn.Parameter] = {}
    return [_construct_layer(layer, ties, tensors, frozen, options) for layer in layers]


# Reason: a parameter after the other is built, frozen, tied or trained.
def _construct_layer(
    layer: Layer,
    ties: Ties,
    tensors: dict[str, TensorState],
    untrained: dict[str, nn.Parameter],
    options: StateOptions,
) -> BuiltLayer:
    """Build one layer and enter its tensors into `tensors`, or into `untrained`, where later
    aliases find them."""
    module, values = _skeleton(layer, ties, options)
    _fill_buffers(layer, module, options)
    sharding = options.sharding
    shards = {} if sharding is None else sharding.shard(layer, module)
    states: list[TensorState] = []
    frozen: list[Tensor] = [slot.tensor for slot in slots(module)]
    for local_name, parameter in list(module.named_parameters()):
        name, shard = layer.full_name(local_name), shards.get(local_name)
        mark = "" if shard is None else f"#{shard.index}"
        owner = tensors.get(f"{ties.get(name, '')}{mark}")
        if not parameter.requires_grad:
            first_use = untrained.get(ties.get(name, ""))
            if first_use is None:
                put_storage(parameter, _storage(parameter, owner, options))
                parameter.detach().copy_(values(local_name))
                frozen.append(parameter)
            else:
                put_storage(parameter, first_use.detach())
            untrained[name] = parameter
            continue
        first = ties.get(name, name)
        tensor = TensorState(
            f"{name}{mark}",
            parameter,
            options.backend.full_index(parameter.numel()),
            decays=parameter.dim() >= 2,
            alias_of=owner,
            shard=shard,
        )
        tensor.shards_kept = tensor.full_numel
        if owner is None and options.masks is not None and first in options.masks.kept:
            _mask(tensor, first, options, partial(values, local_name))
        if options.expansion is None or tensor.kept == parameter.numel():
            put_storage(parameter, _storage(parameter, owner, options))
        tensors[tensor.name] = tensor
        states.append(tensor)
    state = LayerState(
        layer.name,
        states,
        options.stored,
        frozen=frozen,
        replicas=options.replicas,
        group=None if sharding is None else sharding.group,
        backend=options.backend,
        expansion=options.expansion,
    )
    for tensor in state.owned:
        fill(state, tensor, values(layer.local_name(tensor.full_name)))
    # This allocates the moments, and does so only now, when the last fp32 start value is freed.
    del values
    state.optimizer_state.reset_moments()
    return BuiltLayer(layer, module, state)


def _storage(parameter: nn.Parameter, owner: TensorState | None, options: StateOptions) -> Tensor:
    if owner is not None:
        assert owner.expanded_at is None, f"{owner.name} is sparse at rest"
        return owner.parameter.detach()
    return torch.zeros(parameter.shape, dtype=options.stored.weight, device=options.backend.device)


def _mask(tensor: TensorState, first: str, options: StateOptions, value: Weight) -> None:
    """Keep the entries of a tensor that the masks have under the name of its weight's first use."""
    assert options.masks is not None
    mask_D = options.masks.mask(first, tensor.full_shape, value)
    tensor.own_index = options.backend.index(tensor.of_full(mask_D), options.stored.index)
    tensor.shards_kept = options.masks.kept[first]


def full_weights(built: BuiltLayer) -> Iterator[tuple[str, Tensor]]:
    """The full parameters of a layer as they are now, by their names within it; unsharded ones are
    no copies. Sparse weights are dense until the next one is asked for, or as long as the layer is
    expanded. Tensor-parallel ranks go through them together."""
    trained = {tensor.full_name: tensor for tensor in built.state.tensors}
    with built.state.expanded():
        for name, parameter in built.module.named_parameters():
            tensor, value = trained.get(built.spec.full_name(name)), parameter.detach()
            yield name, value if tensor is None else built.state.gathered(tensor, value)


def given_value(start: StartValues | None, name: str, stored: Tensor) -> Tensor:
    """A frozen parameter's given value, on the CPU, if it rounds to `stored`; else `stored`."""
    given = None if start is None else start.read(name)
    if given is None or given.dtype.itemsize <= stored.dtype.itemsize:
        return stored
    return given if given.to(stored.dtype).equal(stored.cpu()) else stored


def fill(state: LayerState, tensor: TensorState, value: Tensor) -> None:
    """Set the kept weights of a tensor from dense fp32 values of the full one, which are freed on
    return."""
    value_D = tensor.of_full(value.view(-1).to(state.backend.device))
    for start, stop in tensor.blocks():
        kept_K = tensor.index.gather(value_D, start, stop)
        state.optimizer_state.write_master(tensor, start, kept_K)


def start_values(layer: Layer, ties: Ties, options: StateOptions) -> dict[str, Weight]:
    """Functions that make the fp32 start values of a layer's trained tensors, by global name."""
    module, values = _skeleton(layer, ties, options)
    return {
        layer.full_name(local_name): partial(values, local_name)
        for local_name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _skeleton(
    layer: Layer, ties: Ties, options: StateOptions
) -> tuple[nn.Module, Callable[[str], Tensor]]:
    """The module, and a function that makes the fp32 start value of a parameter by its local name:
    twice where there is a mask, since keeping the values would hold an entire layer in fp32."""
    init, start, seed = layer.init, options.start, options.seed
    if init is None:
        with preserved_rng(is_seeded=True):
            seed_all(seed, layer.name, "init")
            module = layer.build()
    else:
        module = on_meta(layer)
    built = {name: parameter.detach() for name, parameter in module.named_parameters()}
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def value(name: str) -> Tensor:
        full, shape = layer.full_name(name), tuple(built[name].shape)
        owner = ties.get(full, full)
        given = None if start is None else start.read(owner)
        if given is not None:
            assert tuple(given.shape) == shape, owner
        elif init is not None:
            # An `init` may leave its generator unused and draw from a global one.
            with preserved_rng(is_seeded=True):
                seed_all(seed, owner, "init")
                given = init(name, shape, keyed_generator(seed, owner, "init"))
            if not isinstance(given, Tensor) or tuple(given.shape) != shape:
                kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise ConfigError(
                    f"layer {layer.name}: its init gave {kind} for {name}; return a tensor of "
                    f"shape {shape}"
                )
        else:
            given = built[name]
        wrong = mismatched_values(given, trained=name in trained)
        if wrong:
            raise ConfigError(
                f"parameter {full}: its start value is {wrong}; correct the layer's init or "
                "build, or what it starts from"
            )
        return given.float().contiguous()

    return module, value


def _fill_buffers(layer: Layer, module: nn.Module, options: StateOptions) -> None:
    start = options.start
    for slot in slots(module):
        given = None if start is None else start.read(layer.full_name(slot.name))
        if given is not None:
            assert given.shape == slot.tensor.shape, slot.name
            slot.put(given.detach().to(slot.tensor.dtype, copy=True))
        elif slot.tensor.is_meta and slot.is_statistic:
            slot.put(slot.start())
        elif slot.tensor.is_meta:
            raise ConfigError(
                f"layer {layer.name}: buffer {slot.name!r} has no contents, because a layer with "
                "`init` is built on the meta device; leave `init` out or compute it in forward"
            )
        tensor = slot.tensor.to(options.backend.device)
        # A run that resumes reads state in this form.
        slot.put(canonical(tensor) if slot.persists else tensor)
