"""Profiles a model, layer by layer, without allocating memory for it.

`profile` builds every layer on the meta device, checks the model's declaration, and returns
names, shapes and costs.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from axsparse.models.layer import (
    Kind,
    Layer,
    LayerSharding,
    Model,
    StartValues,
    TensorShard,
    Tie,
    Ties,
    on_meta,
)
from axsparse.models.layer_cost import NO_SUMS, SAMPLES, Activations, LayerSums, Tracer
from axsparse.models.module_buffers import (
    NOT_DENSE,
    named_tensors,
    other_names,
    reject_aliases,
    slots,
    unfilled_attribute,
)
from axsparse.models.sequential import reject_lazy, reject_other_tuple, reject_script
from axsparse.models.stand_ins import PartModule, are_alike
from axsparse.runtime.errors import ConfigError, check_kind, check_kinds, one_line
from axsparse.runtime.files.safetensors import can_be_stored
from axsparse.runtime.seeds import preserved_rng

EXAMPLE = "give a function of a number of samples, such as lambda n: (inputs[:n],)"
COPIABLE = "give a module that copy.deepcopy can copy"
FLOPS_PER_BYTE = 100
"""Flops in the time that it takes to move one byte; weighs pooling and norms against matrix
products. Assumed: between a CPU with matrix units (60) and a data-centre GPU (200)."""

MULTIPLYING = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
"""Modules whose weights are matrices that multiply their inputs; these are pruned by default. A
module with an attribute `axsparse_multiplies` says so by itself, and one with an attribute
`axsparse_input_dim` which dimension of its matrices has the inputs (see `ParameterInfo`)."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the model, before pruning."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    trained: bool
    multiplies: bool = True
    """Whether it is a weight of a linear, convolution, recurrent or attention module."""
    input_dim: int | None = None
    """The dimension of the inputs in a stack of matrices, one for each expert: 2 in (experts,
    outputs, inputs), 1 in (experts, inputs, outputs); and 0 in a matrix (inputs, outputs). None:
    it is neither, and has its outputs first."""
    dtype: torch.dtype = torch.float32
    """The type in which it is built, before it is stored in the run's."""
    is_transposed: bool = False
    """Whether it is a weight of a transposed convolution, which has its inputs first."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def matrices(self) -> tuple[int, tuple[int, ...]]:
        """The number of matrices that are pruned each by itself, and their shape; with an
        `input_dim` (outputs, inputs)."""
        if self.input_dim is None:
            return 1, self.shape
        *experts, first, second = self.shape
        is_last = self.input_dim == len(self.shape) - 1
        return math.prod(experts), (first, second) if is_last else (second, first)


@dataclass(frozen=True)
class BufferInfo:
    name: str
    """Global name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    persists: bool
    """Whether it is part of the state dict; if not, it is a cache."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerInfo:
    name: str
    kind: Kind
    parameters: tuple[ParameterInfo, ...]
    flops: float
    """Floating-point operations of one sample's forward pass."""
    buffers: tuple[BufferInfo, ...] = ()
    activations: Activations | None = None
    """Bytes of one sample's activations; None if the model has no example."""
    sums: LayerSums = NO_SUMS
    """Sums over tensor-parallel ranks while one sample passes through the layer."""
    other_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further names of parameters and buffers of the layer, each with the one that they have."""

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def work(self) -> float:
        """The time of one sample's forward pass, in flops: computing, and moving activations."""
        moved = self.activations
        return self.flops + (FLOPS_PER_BYTE * (moved.saved + moved.outputs) if moved else 0.0)


@dataclass(frozen=True)
class ModelProfile:
    layers: Sequence[LayerInfo]
    ties: Ties
    start: str = ""
    """Fingerprint of `Model.start`; empty if the layers draw their start values."""
    loss_logits: Callable[[int], int] | None = None
    """`Model.loss_logits`."""
    loss_sums: LayerSums = NO_SUMS
    """Sums over tensor-parallel ranks in the loss, as `LayerInfo.sums`."""
    teacher: ModelProfile | None = None
    """The contents of `Model.teacher`."""

    @property
    def other_names(self) -> dict[str, str]:
        return {name: first for layer in self.layers for name, first in layer.other_names.items()}

    def taught(self, numbers: range) -> range:
        """The numbers of the teacher's layers next to these layers, which are consecutive: as large
        a part of the teacher as these are of the model; empty without a teacher."""
        count, own = 0 if self.teacher is None else len(self.teacher.layers), len(self.layers)
        return range(numbers.start * count // own, numbers.stop * count // own)

    def taught_by(self, numbers: range) -> Sequence[LayerInfo]:
        """The teacher's layers of `taught`."""
        layers = () if self.teacher is None else self.teacher.layers
        return [layers[number] for number in self.taught(numbers)]

    @property
    def num_params(self) -> int:
        """Number of parameters before pruning; a tied weight counts once."""
        return sum(parameter.numel for parameter in self._parameters())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by global name, in model order, a tied weight once; they identify the model."""
        return {parameter.name: parameter.shape for parameter in self._parameters()}

    @property
    def counted(self) -> list[str]:
        """Names of the trained parameters, in model order, a tied weight once.

        The gradient norm is taken over these.
        """
        return [parameter.name for parameter in self._parameters() if parameter.trained]

    def _parameters(self) -> Iterator[ParameterInfo]:
        return (p for layer in self.layers for p in layer.parameters if p.name not in self.ties)

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)

    @property
    def work(self) -> float:
        return sum(layer.work for layer in self.layers)

    @property
    def shares_of_work(self) -> list[float]:
        """The work of each layer, by which stages are balanced: `LayerInfo.work`, and a third of
        the work of the teacher's layers next to it, which have no backward."""
        return [
            layer.work + sum(each.work for each in self.taught_by(range(n, n + 1))) / 3
            for n, layer in enumerate(self.layers)
        ]

    def layer_of(self, name: str) -> int:
        """The number of the layer that holds a parameter; KeyError if none does."""
        owners = {p.name: n for n, layer in enumerate(self.layers) for p in layer.parameters}
        return owners[name]


def profile(
    model: Model,
    dtype: torch.dtype = torch.float32,
    *,
    samples: int = SAMPLES,
    device: torch.device | None = None,
) -> ModelProfile:
    """Profile a model; `dtype` is the type of its activations.

    `samples` of `Model.example` pass through the layers, on the meta device or really on `device`.
    Raises CostError for a layer that does not run, and ConfigError for a declaration that does not
    fit: duplicate names, layers that cannot be built, parameters that cannot be trained, ties
    between different shapes.
    """
    check_arguments(model)
    tracer = None
    if model.example is not None:
        example = example_of(model.example, samples)
        tracer = Tracer(example, dtype, samples=samples, device=device)
        tracer.start = model.start
    layers = profile_layers(model.layers, tracer)
    parameters = _by_name(layers)
    if not any(parameter.trained for parameter in parameters.values()):
        raise ConfigError("model: no parameter requires a gradient; there is nothing to train")
    named = 'give functions by their names, such as {"top1": ax.count_top1}'
    check_kind("model: metrics", model.metrics, Mapping, named)
    for metric, function in model.metrics.items():
        check_kind(f"metric {metric}", function, Callable, named)
        if metric in ("", "step", "eval_loss", "perplexity"):
            raise ConfigError(
                f"metric {metric!r}: evaluations have a figure of this name, or it has none; "
                "give it another"
            )
    ties = _ties(model, parameters)
    if model.start is None:
        _check_tied_starts(model, layers, ties)
    start = "" if model.start is None else model.start.fingerprint
    teacher = None
    if model.teacher is not None:
        taught = model.teacher.model
        teacher = profile(taught if tracer else replace(taught, example=None), dtype)
    return ModelProfile(layers, ties, start, model.loss_logits, teacher=teacher)


def check_arguments(model: Model) -> None:
    """ConfigError for members of a model, or of its layers, of other types than they are to be."""
    optional = {"loss_logits": "function or None", "vocab_size": "whole number or None"}
    check_kinds("model", vars(model), name="text", **optional)
    for name in ("layers", "ties"):
        check_kind(f"model: {name}", vars(model)[name], Sequence, "give a list")
    way = "give what ax.start_from sets, or a class with the members of ax.StartValues"
    check_kind("model: start", model.start, StartValues | None, way)
    if not model.layers:
        raise ConfigError("model: no layers; a model is a list of at least one")
    for number, given in enumerate(model.layers):
        where, way = f"model: layer {number}", "make it Layer(name, build), or use from_sequential"
        check_kind(where, given, Layer, way)
        optional = {"init": "function or None", "flops": "number or None"}
        check_kinds(where, vars(given), name="text", prefix="text or None", **optional)
        if isinstance(given.build, nn.Module):
            raise ConfigError(
                f"{where}: build is a module; give a function that makes one (lambda: "
                f"{type(given.build).__name__}(...))"
            )
        if given.flops is not None and not 0 <= float(given.flops) < math.inf:
            raise ConfigError(
                f"{where}: flops is {given.flops}; give a number from 0 on, or None to count them"
            )


def _by_name(layers: Sequence[LayerInfo]) -> dict[str, ParameterInfo]:
    """The parameters of all layers by name; ConfigError for names used twice or unfit for files."""
    parameters: dict[str, ParameterInfo] = {}
    names: set[str] = set()
    for layer in layers:
        if re.fullmatch(r"[A-Za-z0-9_.-]+", layer.name) is None:
            raise ConfigError(
                f"layer {layer.name!r}: names become file names; use letters, digits, '_', '-', '.'"
            )
        if layer.name in names:
            raise ConfigError(f"layer {layer.name}: two layers have this name; rename one")
        names.add(layer.name)
        for parameter in layer.parameters:
            if parameter.name in parameters:
                raise ConfigError(
                    f"parameter {parameter.name}: two parameters have this global name; "
                    f"rename layer {layer.name}"
                )
            parameters[parameter.name] = parameter
    return parameters


def example_of(
    make: Callable[[int], tuple[Tensor, ...]], samples: int, where: str = "Model.example"
) -> tuple[Tensor, ...]:
    """The inputs that an example makes; ConfigError, with the place, if these are not tensors."""
    check_kind(where, make, Callable, EXAMPLE)
    try:
        inspect.signature(make).bind(samples)
    except TypeError as reason:
        raise ConfigError(f"{where}: takes other arguments ({reason}); {EXAMPLE}") from reason
    except ValueError:  # The signature is unknown.
        pass
    inputs = make(samples)
    if not isinstance(inputs, tuple) or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise ConfigError(
            f"{where}: returned {type(inputs).__name__}; return a tuple of tensors, what the first "
            "layer gets"
        )
    return inputs


def match(patterns: Sequence[str], names: Sequence[str], where: str, none: str) -> list[str]:
    """The names that match any of the patterns, in the order of `names`.

    A pattern may contain `*`, `?` and `[…]`; case counts, and `*` matches dots, too. `where` is
    the key of the patterns, and their file if known. Raises ConfigError for a pattern that matches
    no name, or as the message says, `none`.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0)) or "none"
            # A module's name, the end of a name, and another case.
            forms = (f"{pattern}.*", f"*.{pattern}.*", f"*.{pattern}", pattern.lower())
            meant = [one for one in forms if any(fnmatchcase(name, one) for name in names)]
            way = f"did you mean {meant[0]!r}?" if meant else f"nearest: {nearest}"
            raise ConfigError(f"{where}: {pattern!r} matches {none}; {way}")
    return [name for name in names if any(fnmatchcase(name, one) for one in patterns)]


def named_value(key: str, entry: str, below: float, form: str) -> tuple[str, float]:
    """The pattern and the number of an entry `pattern=number` of the setting `key`.

    ConfigError, which says the form, unless the number is at least 0 and less than `below`.
    """
    pattern, _, number = entry.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not pattern or not 0 <= value < below:
        raise ConfigError(f"{key}: {entry!r} is not {form}")
    return pattern.strip(), value


def costs_of(profiled: ModelProfile) -> list[Any]:
    """The costs of teacher and layers for JSON, for ranks that have not measured them."""
    taught = profiled.teacher and costs_of(profiled.teacher)
    own = [
        [layer.flops, layer.activations and astuple(layer.activations)] for layer in profiled.layers
    ]
    return [taught, *own]


def with_costs(profiled: ModelProfile, costs: Sequence[Any]) -> ModelProfile:
    """A copy of a profile with the costs of another rank's `costs_of`."""
    taught, *own = costs
    layers = [
        replace(layer, flops=flops, activations=activations and Activations(*activations))
        for layer, (flops, activations) in zip(profiled.layers, own, strict=True)
    ]
    teacher = profiled.teacher and with_costs(profiled.teacher, taught)
    return replace(profiled, layers=layers, teacher=teacher)


def profile_layers(
    layers: Sequence[Layer], tracer: Tracer | None, sharding: LayerSharding | None = None
) -> list[LayerInfo]:
    """The contents of all layers, or of the shards of one rank; a layer like the one before, with
    inputs like its, is not built and run again.

    A sharded parameter appears with the index of its shard, such as "block0.fc1.weight#1".
    """
    found: list[LayerInfo] = []
    shapes: object = None
    for number, layer in enumerate(layers):
        shapes_before, shapes = shapes, None if tracer is None else tracer.shapes
        if number and tracer is not None and issubclass(tracer.result_type, (tuple, list)):
            count = len(tracer.shapes)
            reject_other_tuple(layers[number - 1], layer, count, tracer.result_type)
        # Layers that really run pass on values, by which later ones may differ.
        is_known = number and shapes == shapes_before and not (tracer and tracer.device)
        if is_known and _are_alike(layers[number - 1], layer):
            found.append(_renamed(found[-1], layer.name))
        else:
            found.append(_profile_layer(layer, tracer, sharding))
    return found


def _are_alike(one: Layer, other: Layer) -> bool:
    """Whether two layers are built and initialised by the same functions of equal arguments."""
    if one != replace(other, name=one.name, build=one.build, init=one.init):
        return False
    same_init = one.init is other.init or isinstance(one.init, partial)
    is_called_alike = same_init and isinstance(one.build, partial)
    return is_called_alike and are_alike([one.build, one.init], [other.build, other.init])


def _renamed(info: LayerInfo, name: str) -> LayerInfo:
    begin = len(info.name)
    parameters = tuple(replace(p, name=name + p.name[begin:]) for p in info.parameters)
    buffers = tuple(replace(b, name=name + b.name[begin:]) for b in info.buffers)
    return replace(info, name=name, parameters=parameters, buffers=buffers)


def _profile_layer(
    layer: Layer, tracer: Tracer | None, sharding: LayerSharding | None
) -> LayerInfo:
    if layer.kind not in get_args(Kind):
        raise ConfigError(
            f"layer {layer.name}: kind is {layer.kind!r}; choose one of {', '.join(get_args(Kind))}"
        )
    module = _module_of(layer)
    _check_module(layer, module)
    numel = sum(parameter.numel() for parameter in module.parameters())
    module, names = _sharded(layer, module, sharding)
    weights, transposed, input_dims = set[int](), set[int](), dict[int, int]()
    for child in module.modules():
        is_of_torch = isinstance(child, MULTIPLYING)
        multiplies = getattr(child, "axsparse_multiplies", is_of_torch)
        input_dim: Any = getattr(child, "axsparse_input_dim", None)
        for name, parameter in child.named_parameters(recurse=False):
            # Further parameters of a linear layer, such as factors of low rank, are not its weight.
            if multiplies and "bias" not in name and ("weight" in name or not is_of_torch):
                weights.add(id(parameter))
                if isinstance(child, nn.modules.conv._ConvTransposeNd):
                    transposed.add(id(parameter))
            if input_dim is not None and parameter.dim() == (3 if input_dim else 2):
                input_dims[id(parameter)] = int(input_dim)
    parameters = tuple(
        ParameterInfo(
            layer.full_name(name),
            tuple(p.shape),
            p.requires_grad,
            id(p) in weights,
            input_dims.get(id(p)),
            p.dtype,
            id(p) in transposed,
        )
        for name, p in names.items()
    )
    buffers = tuple(
        BufferInfo(layer.full_name(slot.name), tuple(b.shape), b.dtype, slot.persists)
        for slot in slots(module)
        for b in [slot.tensor]
    )
    here = sum(parameter.numel for parameter in parameters)
    flops, activations, sums = 2.0 * here, None, NO_SUMS
    if tracer is not None:
        module = module if tracer.device is None else _module_with_values(layer, tracer.start)
        flops, activations = tracer.run(layer.name, module)
        sums = tracer.sums
    if layer.flops is not None:
        flops = float(layer.flops) * (here / numel if here != numel else 1.0)
    others = {layer.full_name(a): layer.full_name(b) for a, b in other_names(module).items()}
    facts = parameters, flops, buffers, activations, sums, others
    return LayerInfo(layer.name, layer.kind, *facts)


def _sharded(
    layer: Layer, module: nn.Module, sharding: LayerSharding | None
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The module as one rank has it, and its parameters in order, a shard's name with its index."""
    order = [name for name, _ in module.named_parameters()]
    shards: Mapping[str, TensorShard] = {}
    if sharding is not None and layer.tp_plan:
        if not all(parameter.is_meta for parameter in module.parameters()):
            module = copy.deepcopy(module)  # The module may be the user's.
        shards = sharding.shard(layer, module)
    return module, {
        f"{name}#{shards[name].index}" if name in shards else name: module.get_parameter(name)
        for name in order
    }


def _module_of(layer: Layer) -> nn.Module:
    """The module on the meta device, or in memory if it cannot be built there."""
    with preserved_rng(), warnings.catch_warnings():
        if layer.init is None:  # Values that `build` loads are needed on the owning stage only.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        try:
            module = _built(layer)
            own = list(module.parameters()) if isinstance(module, nn.Module) else []
            # A module with memory, despite the meta device, may be the same one in every call.
            again = () if all(p.is_meta for p in own) else _built(layer).parameters()
        except Exception as reason:
            made = str(getattr(getattr(layer.build, "func", layer.build), "__module__", ""))
            suggestion = "; correct the function that makes the module"
            if made.startswith("axsparse."):  # a module of ours, or a copy of one of the user's
                is_ours = made.startswith("axsparse.models.zoo.")
                suggestion = "" if is_ours else f"; {COPIABLE}"
            raise ConfigError(
                f"layer {layer.name}: its build raised {one_line(reason)}{suggestion}"
            ) from reason
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"layer {layer.name}: its build returned {type(module).__name__}; "
            "return a torch.nn.Module"
        )
    reject_script(module)
    if {*map(id, own)} & {*map(id, again)}:
        raise ConfigError(
            f"layer {layer.name}: its build returned the same parameters twice; make new ones in "
            "every call (lambda: copy.deepcopy(module)), and join two uses of one weight by a Tie"
        )
    return module


def _built(layer: Layer) -> nn.Module:
    try:
        return on_meta(layer)
    except (NotImplementedError, RuntimeError):
        if layer.init is not None:
            raise
        return layer.build()


def _module_with_values(layer: Layer, start: StartValues | None) -> nn.Module:
    """A new module of the layer in memory; buffers that nothing gives values are zero."""
    with preserved_rng():
        module = layer.build() if layer.init is None else on_meta(layer)
        tensors = (*module.named_parameters(), *module.named_buffers())
        if any(tensor.is_meta for _, tensor in tensors):
            module = module.to_empty(device="cpu")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            given = None if start is None else start.read(layer.full_name(name))
            if given is None and layer.init is not None:
                is_drawn = isinstance(tensor, nn.Parameter)
                shape = tuple(tensor.shape)
                given = layer.init(name, shape, torch.Generator()) if is_drawn else torch.zeros(())
            if given is not None:
                tensor.data.copy_(given)
    return module


def _check_module(layer: Layer, module: nn.Module) -> None:
    """ConfigError for parameters that cannot be trained, and buffers that cannot be saved."""
    is_filled = layer.init is not None and not isinstance(module, PartModule)
    if is_filled and (unfilled := unfilled_attribute(module)) is not None:
        raise ConfigError(
            f"layer {layer.name}: {unfilled!r} is a tensor without values, since `init` fills "
            "parameters only; make it in the forward, or leave Layer's init out"
        )
    for child in module.modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ConfigError(
                f"layer {layer.name}: SyncBatchNorm needs torch.distributed, and its results would "
                "depend on the layout; use BatchNorm, which sees one microbatch"
            )
    reject_lazy(f"layer {layer.name}", module)
    reject_aliases(f"layer {layer.name}", dict(named_tensors(module)))
    for name, parameter in module.named_parameters():
        if (
            not parameter.is_floating_point()
            or parameter.dtype == torch.float64
            or not can_be_stored(parameter)
        ):
            is_dense = parameter.layout == torch.strided
            way = "give its module .float()"
            if not is_dense:
                way = "make it an nn.Parameter of .to_dense()"
            elif not parameter.is_floating_point():
                way = "make it an nn.Parameter of two parts (torch.view_as_real), or a buffer"
            raise ConfigError(
                f"layer {layer.name}: parameter {name!r} is "
                f"{parameter.dtype if is_dense else parameter.layout}, and parameters are dense, "
                f"of real numbers of 8 to 32 bits; {way}"
            )
    for slot in slots(module):
        where, tensor = f"layer {layer.name}: buffer {slot.name!r}", slot.tensor
        is_dense = tensor.layout == torch.strided
        if not is_dense or (slot.persists and not can_be_stored(tensor)):
            raise ConfigError(
                f"{where} is {tensor.dtype if is_dense else tensor.layout}, {NOT_DENSE}"
            )


def _ties(model: Model, parameters: Mapping[str, ParameterInfo]) -> Ties:
    """The model's ties; ConfigError for a tie that does not fit the parameters."""
    order = list(parameters)
    for number, tie in enumerate(model.ties):
        check_kind(f"model: tie {number}", tie, Tie, "make it Tie(first, second)")
        check_kinds(f"model: tie {number}", vars(tie), first="text", second="text")
    used = [name for tie in model.ties for name in (tie.first, tie.second)]
    for tie in model.ties:
        pair = [parameters[name] for name in (tie.first, tie.second) if name in parameters]
        if not (
            len(pair) == 2
            and (pair[0].shape, pair[0].trained) == (pair[1].shape, pair[1].trained)
            and order.index(tie.first) < order.index(tie.second)
            and used.count(tie.first) == used.count(tie.second) == 1
        ):
            found = [f"{p.name} {p.shape}{'' if p.trained else ', frozen'}" for p in pair]
            there = " and ".join(found) or "neither"
            raise ConfigError(
                f"tie {tie.first} = {tie.second}: the model has {there}; "
                "a tie joins two parameters of one shape, both trained or neither, the earlier one "
                "first, and each in one tie alone (one layer may use a weight any number of times)"
            )
    return {tie.second: tie.first for tie in model.ties}


def _check_tied_starts(model: Model, layers: Sequence[LayerInfo], ties: Ties) -> None:
    """ConfigError if two uses of a weight, on two stages say, could start differently."""
    owners = {
        parameter.name: layer
        for layer, info in zip(model.layers, layers, strict=True)
        for parameter in info.parameters
    }
    for second, first in ties.items():
        one, other = owners[first], owners[second]
        if one is not other and (one.init is None or one.init is not other.init):
            raise ConfigError(
                f"tie {first} = {second}: layers {one.name} and {other.name} have no common "
                "`init`, so that the uses could start differently on two stages; give both the same"
            )
