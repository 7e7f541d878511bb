"""Layers built straight into their final storage, one parameter at a time.

A parameter is initialised in fp32, pruned, compressed and rounded before the next one
exists, so building a stage needs memory for its final state and one fp32 parameter only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from axsparse.models.layer import Layer, StartValues, odd_values, on_meta
from axsparse.models.module_buffers import slots
from axsparse.models.tensor_group import Cut, TensorGroup
from axsparse.models.tensor_parallel import cut_module, cuts_of
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.seeds import keyed_generator, preserved_rng, seed_all
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.masks import Masks
from axsparse.samo.shards import ALONE, Replicas
from axsparse.samo.state_bytes import IndexKind, master_kind
from axsparse.samo.tensor_state import TensorState, Whole

StartOf: TypeAlias = Callable[[str], Tensor]
"""Makes the fp32 start value of a parameter of a layer, by its name within the layer."""


@dataclass(frozen=True)
class BuiltLayer:
    """A layer of this stage: its module and the state of its trained parameters."""

    spec: Layer
    module: nn.Module
    state: LayerState
    names: Mapping[str, str] = field(default_factory=dict)
    """The global name of each parameter of the uncut layer, in its order, and the name within the
    module, where it is not cut; empty where it is."""

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank answers for, with global names: all but those that are
        whole on member 0 as well."""
        chunks = {id(t.parameter): t.name for t in self.state.tensors if t.chunk_of is not None}
        is_first = self.state.members is None or self.state.members.rank == 0
        for name, parameter in self.module.named_parameters():
            if id(parameter) in chunks:
                yield chunks[id(parameter)], parameter
            elif is_first:
                yield f"{self.spec.name}.{name}", parameter


@dataclass(frozen=True)
class StateOptions:
    """How the layers of a stage are built; equal on all ranks but for `replicas` and `backend`."""

    dtype: torch.dtype
    """The type of weights, activations and messages."""
    gradient_dtype: torch.dtype
    """The type of accumulated gradients."""
    moments: tuple[str, ...]
    """Names of the optimizer's moments."""
    seed: int
    """Seeds the generators of start values."""
    masks: Masks | None
    """Which entries are kept from the start; None builds dense state."""
    index: IndexKind = "int32"
    """How tensors that are pruned now or later store their kept positions."""
    replicas: Replicas = ALONE
    """The ranks that hold the same layers."""
    members: TensorGroup | None = None
    """The ranks that share the layers, which are cut into chunks; None if layers are whole."""
    start: StartValues | None = None
    """The values that the model starts from; None leaves that to its layers."""
    backend: Backend = HOST
    """The device of the state, and what computes there."""

    @property
    def types(self) -> StateTypes:
        """The forms in which the state of a layer is stored."""
        master = master_kind(half=self.dtype != torch.float32)
        return StateTypes(self.gradient_dtype, master, self.moments, self.index)


def build_layers(
    layers: Sequence[Layer], ties: Mapping[str, str], options: StateOptions
) -> list[BuiltLayer]:
    """Build the layers of one stage.

    `ties` maps the global name of a weight's second use to that of its first. Both
    uses start, and are pruned, as one weight; where both are in `layers`, they share
    one storage. Raises ConfigError where the shapes of two uses differ, an `init` gives no tensor
    of the right shape, or a buffer has no contents.
    """
    tensors: dict[str, TensorState] = {}
    return [_construct_layer(layer, ties, tensors, options) for layer in layers]


def _construct_layer(
    layer: Layer,
    ties: Mapping[str, str],
    tensors: dict[str, TensorState],
    options: StateOptions,
) -> BuiltLayer:
    """Build one layer and enter its tensors into `tensors`, where later aliases find them."""
    module, values = _skeleton(layer, ties, options)
    _fill_buffers(layer, module, options)
    chunks = _cut(layer, module, options)
    states: list[TensorState] = []
    frozen: list[Tensor] = [slot.tensor for slot in slots(module)]
    for local_name, parameter in list(module.named_parameters()):
        if local_name in chunks.places:
            continue
        name = f"{layer.name}.{local_name}"
        owner = tensors.get(ties.get(name, ""))
        shape = tuple(parameter.shape)
        if owner is not None and tuple(owner.parameter.shape) != shape:
            raise ConfigError(
                f"tie {owner.name} = {name}: shapes {tuple(owner.parameter.shape)} and {shape} "
                "differ; a tie joins two uses of one weight"
            )
        if owner is None:
            storage = torch.zeros(shape, dtype=options.dtype, device=options.backend.device)
        else:
            storage = owner.parameter.detach()
        put_storage(parameter, storage)
        if not parameter.requires_grad:
            parameter.detach().copy_(values(local_name))
            frozen.append(parameter)
            continue
        index = options.backend.full_index(parameter.numel())
        first, masks = ties.get(name, name), options.masks
        if owner is None and masks is not None and first in masks.kept:
            mask_D = masks.mask(first, shape, partial(values, local_name))
            index = options.backend.index(mask_D, options.index)
            del mask_D
        tensors[name] = TensorState(name, parameter, index, decays=len(shape) >= 2, alias_of=owner)
        states.append(tensors[name])
    states += _chunk_states(layer, ties, tensors, options, (module, values, chunks))
    states.sort(key=lambda tensor: chunks.order.index(tensor.whole_name))
    state = LayerState(
        layer.name,
        states,
        options.types,
        frozen=frozen,
        replicas=options.replicas,
        members=options.members,
        backend=options.backend,
    )
    for whole in state.wholes.values():
        fill(state, whole, values(whole.name.removeprefix(f"{layer.name}.")))
    # This allocates the moments, and does so only now, when the last fp32 start value is freed.
    state.optimizer_state.reset_moments()
    return BuiltLayer(layer, module, state, chunks.names)


@dataclass(frozen=True)
class _Chunks:
    """What of a layer is cut."""

    names: Mapping[str, str]
    """`BuiltLayer.names`."""
    cuts: Mapping[str, Cut]
    """How parameters are cut, by their names within the uncut layer."""
    places: Mapping[str, tuple[str, int]]
    """What `cut_module` returns."""

    @property
    def order(self) -> list[str]:
        """The global names of the parameters of the uncut layer."""
        return list(self.names)


def _cut(layer: Layer, module: nn.Module, options: StateOptions) -> _Chunks:
    """Cut a layer's module, if members share it."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    cuts: Mapping[str, Cut] = {}
    places: Mapping[str, tuple[str, int]] = {}
    if options.members is not None:
        cuts = cuts_of(layer.name, layer.tensor, shapes, options.members.chunks)
        places = cut_module(layer, module, cuts, options.members)
    names = {f"{layer.name}.{name}": "" if name in cuts else name for name in shapes}
    return _Chunks(names, cuts, places)


def _chunk_states(
    layer: Layer,
    ties: Mapping[str, str],
    tensors: dict[str, TensorState],
    options: StateOptions,
    cut: tuple[nn.Module, StartOf, _Chunks],
) -> list[TensorState]:
    """The chunks of a layer's tensors that are here, entered into `tensors`; `cut` has the module,
    its start values, and what is cut."""
    module, values, chunks = cut
    wholes: dict[str, tuple[Whole, Tensor | None]] = {}
    states = []
    for place, (local, number) in chunks.places.items():
        name = f"{layer.name}.{local}"
        owner, masks = tensors.get(ties.get(f"{name}#{number}", "")), options.masks
        if local not in wholes:
            shape, first, mask_D = chunks.cuts[local].shape, ties.get(name, name), None
            whole = Whole(name, shape, torch.Size(shape).numel(), chunks.cuts[local])
            if owner is None and masks is not None and first in masks.kept:
                mask_D = masks.mask(first, shape, partial(values, local))
                whole.kept = masks.kept[first]
            wholes = {local: (whole, mask_D)}  # and no longer that of the tensor before
        whole, mask_D = wholes[local]
        parameter = module.get_parameter(place)
        numel, decays = parameter.numel(), len(whole.shape) >= 2
        index = options.backend.full_index(numel)
        state = TensorState(
            f"{name}#{number}", parameter, index, decays, owner, chunk_of=whole, chunk=number
        )
        if mask_D is not None:
            state.own_index = options.backend.index(whole.part(state, mask_D), options.index)
        storage = torch.zeros(parameter.shape, dtype=options.dtype, device=options.backend.device)
        put_storage(parameter, storage if owner is None else owner.parameter.detach())
        whole.parts.append(state)
        tensors[state.name] = state
        states.append(state)
    return states


def fill(state: LayerState, whole: Whole, value: Tensor) -> None:
    """Set the kept weights of a tensor from dense fp32 values.

    A function of its own, so that `value` is freed before the caller makes the next one.
    """
    value_D = value.view(-1).to(state.backend.device)
    for tensor in whole.parts:
        part_D = whole.part(tensor, value_D)
        for start, stop in tensor.blocks():
            kept_K = tensor.index.gather(part_D, start, stop)
            state.optimizer_state.write_master(tensor, start, kept_K)


def start_values(
    layer: Layer, ties: Mapping[str, str], options: StateOptions
) -> dict[str, Callable[[], Tensor]]:
    """Functions that make the fp32 start values of a layer's trained tensors, by global name."""
    module, values = _skeleton(layer, ties, options)
    return {
        f"{layer.name}.{local_name}": partial(values, local_name)
        for local_name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _skeleton(
    layer: Layer, ties: Mapping[str, str], options: StateOptions
) -> tuple[nn.Module, Callable[[str], Tensor]]:
    """The module, and a function that makes the fp32 start value of a parameter by its local name.

    It is called twice for a parameter with a mask, because keeping the values would hold a whole
    layer in fp32.
    """
    init, start, seed = layer.init, options.start, options.seed
    if init is None:
        with preserved_rng(is_seeded=True):
            seed_all(seed, layer.name, "init")
            module = layer.build()
    else:
        module = on_meta(layer)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    def value(name: str) -> Tensor:
        full = f"{layer.name}.{name}"
        owner = ties.get(full, full)
        given = None if start is None else start.read(owner)
        if given is not None:
            assert tuple(given.shape) == shapes[name], owner
        elif init is not None:
            # An `init` may leave its generator unused and draw from a global one.
            with preserved_rng(is_seeded=True):
                seed_all(seed, owner, "init")
                given = init(name, shapes[name], keyed_generator(seed, owner, "init"))
            if not isinstance(given, Tensor) or tuple(given.shape) != shapes[name]:
                kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise ConfigError(
                    f"layer {layer.name}: its init gave {kind} for {name}; return a tensor of "
                    f"shape {shapes[name]}"
                )
        else:
            given = parameters[name]
        odd = odd_values(given, trained=trained[name])
        if odd:
            raise ConfigError(
                f"parameter {full}: its start value is {odd}; mend the layer's init or "
                "build, or what it starts from"
            )
        return given.float().contiguous()

    return module, value


def put_storage(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter the contents of `storage`.

    It stays the same object: the module may hold it elsewhere as well, such as in a list, and may
    have hooks and attributes of its own on it.
    """
    if torch._has_compatible_shallow_copy_type(parameter, storage):
        parameter.data = storage
        return
    # The parameter is on the meta device. Autograd's record of its hooks is lost with its old
    # contents.
    new = nn.Parameter(storage, parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)
    if type(new) is not type(parameter):  # such as that of a device written in Python
        parameter.__class__ = type(new)
        vars(parameter).update(vars(new))
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, kind)
        if hooks:
            setattr(parameter, kind, hooks)


def _fill_buffers(layer: Layer, module: nn.Module, options: StateOptions) -> None:
    """Give buffers their start values, on the device; buffers on the meta device have no values
    yet."""
    start = options.start
    for slot in slots(module):
        given = None if start is None else start.read(f"{layer.name}.{slot.name}")
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
