"""Makes a `Model` of modules, each of which is a layer, and one module of a trained `Model`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from axsparse.models.layer import (
    Kind,
    Layer,
    LossFunction,
    MetricFunction,
    Model,
    Ties,
    as_arguments,
    on_meta,
    takes,
)
from axsparse.models.module_buffers import (
    NOT_DENSE,
    has_own_train,
    named_tensors,
    reject_aliases,
    set_mode,
    slots,
    start_training,
    unfilled_attribute,
    version,
)
from axsparse.runtime.canonical_form import bytes_of, digest_of
from axsparse.runtime.errors import ConfigError, check_kind


def from_sequential(
    modules: nn.Sequential | nn.ModuleDict | Iterable[nn.Module] | Mapping[str, nn.Module],
    loss: LossFunction,
    *,
    kinds: Mapping[Any, Kind] = {},
    metrics: Mapping[str, MetricFunction] = {},
    name: str = "sequential",
    example: Callable[[int], tuple[Tensor, ...]] | None = None,
) -> Model:
    """A model whose layers are modules; each takes what the one before returns.

    The layers have their names in the `nn.Sequential` or mapping, or "0", "1", … in a list. `loss`,
    `metrics` and `example` are as in `Model`. An `nn.Embedding` is an embedding, the last module
    with parameters is the head, and all others are blocks; `kinds` overrides this for the layers
    that it names, or numbers. If the first module is an embedding, its rows are the vocabulary.

    The model starts at the values of the modules, which are not changed by training.

    Raises ConfigError if two modules share a parameter or buffer, if one is compiled or on the meta
    device, and for a module that does more than to call its modules one after the other.
    """
    given = modules
    if isinstance(modules, Mapping) or type(modules) is nn.ModuleDict:
        modules = _named_modules(modules)
    if isinstance(modules, nn.Module):
        reject_unfit(modules)
        start_training(modules)
    layers = _by_name(modules)
    if isinstance(given, nn.Module):
        _reject_more(given)
    every = nn.ModuleList(layers.values())
    for module in layers.values():
        reject_unfit(module, every)
        start_training(module)
    kinds = _kinds_by_name(kinds, layers)
    _reject_shared(layers)
    is_listed = not isinstance(modules, nn.Sequential) or isinstance(modules, PlainModel)
    full = [layer for layer, module in layers.items() if any(True for _ in module.parameters())]
    made = []
    for layer, module in layers.items():
        by_place: Kind = "head" if layer in full[-1:] else "block"
        by_type: Kind = "embedding" if isinstance(module, nn.Embedding) else by_place
        build = partial(structure if is_listed else _child, module)
        made.append(Layer(layer, build, kind=kinds.get(layer, by_type)))
    named = {
        f"{layer}.{name}": t
        for layer, module in layers.items()
        for name, t in named_tensors(module)
    }
    return Model(
        made,
        loss,
        name=name,
        metrics=metrics,
        start=OwnValues(named, modules if isinstance(modules, nn.Module) else layers.values()),
        example=example,
        vocab_size=_words_of(next(iter(layers.values()), None)),
        container=_container(modules),
    )


def _named_modules(modules: Mapping[str, nn.Module] | nn.ModuleDict) -> PlainModel:
    try:
        return PlainModel(OrderedDict(modules.items()))
    except (KeyError, TypeError) as reason:
        raise ConfigError(
            f"sequential: {reason.args[0]}; give torch.nn.Modules by names that torch takes"
        ) from reason


def _kinds_by_name(kinds: Mapping[Any, Kind], layers: Mapping[str, nn.Module]) -> dict[str, Kind]:
    check_kind("sequential: kinds", kinds, Mapping, 'write them by layer, as {"0": "embedding"}')
    named = {str(layer): kind for layer, kind in kinds.items()}
    for layer in [each for each in named if each not in layers]:
        raise ConfigError(
            f"sequential: kinds names {layer!r}, and the modules are {', '.join(layers)}; choose "
            "one of them"
        )
    return named


def _words_of(first: nn.Module | None) -> int | None:
    """The size of the vocabulary, if the first module looks up the ids as they are given: a class
    or a hook of the user may map others into it."""
    if not isinstance(first, nn.Embedding) or type(first).forward is not nn.Embedding.forward:
        return None
    is_changed = "forward" in vars(first) or bool(first._forward_pre_hooks)
    return None if is_changed else first.num_embeddings


def _reject_more(modules: nn.Module) -> None:
    """ConfigError for code that no stage would run, since stages have the children alone."""
    tensors = {**modules._parameters, **modules._buffers}
    more = {
        "a __call__ of its own": type(modules).__call__ is not nn.Module.__call__,
        "a forward of its own": not runs_in_order(modules) or "forward" in vars(modules),
        f"a parameter or buffer of its own ({', '.join(tensors)})": bool(tensors),
        "hooks of its own": any(vars(modules)[kind] for kind in HOOKS),
    }
    for what, is_so in more.items():
        if is_so:
            way = "give it to ax.from_module, which cuts it"
            if runs_in_order(modules):
                way = "move it into a module (docs/howto/own-models.md cuts a forward)"
            has_names = isinstance(modules, nn.ModuleDict)
            without = "dict(modules)" if has_names else "nn.Sequential(*modules)"
            raise ConfigError(
                f"sequential: {type(modules).__name__} has {what}, and stages have its modules "
                f"alone; {way}, or give {without} to leave it out"
            )


def runs_in_order(modules: nn.Module) -> bool:
    """Whether its class has no forward of its own, and no `__call__`."""
    of_lists = (nn.Module.forward, nn.Sequential.forward, PlainModel.forward)
    return type(modules).forward in of_lists and type(modules).__call__ is nn.Module.__call__


def _container(modules: object) -> nn.Sequential | None:
    """The `nn.Sequential` of the modules, if it is of a class of the user's; else None."""
    is_own = isinstance(modules, nn.Sequential) and type(modules) not in (nn.Sequential, PlainModel)
    return cast(nn.Sequential, modules) if is_own else None


class OwnValues:
    """`StartValues` taken from modules in memory."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        modules: nn.Module | Iterable[nn.Module],
        written: Iterable[str] = (),
    ) -> None:
        """`tensors` has all tensors of the modules, by global name; `written` names numbers and
        texts that forwards of the modules write."""
        reject_aliases("model", tensors)
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided:
                raise ConfigError(f"model: {name} is {tensor.layout}, {NOT_DENSE}")
        self.tensors, self.written = tensors, frozenset(written)
        self._container = modules if isinstance(modules, nn.Module) else nn.ModuleList(modules)
        self._parts = _parts(self._container)
        self.fingerprint = f"modules {digest_of(tensors.items())}"

    def read(self, name: str) -> Tensor | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.detach().cpu()

    def reject_replaced(self) -> None:
        """ConfigError for modules, parameters or buffers that are others than at first."""
        now = _parts(self._container)
        if [*map(id, now)] != [*map(id, self._parts)]:
            raise ConfigError(
                "model: a module, parameter or buffer has been added or replaced since the model "
                "was made, which keeps the old ones; replace it before, or make the model again"
            )

    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name, as they are now: a move to another device replaces them."""
        return {slot.name: slot.tensor for slot in slots(self._container)}

    def paths(self, name: str) -> list[str]:
        """All paths of the module that has an attribute of this name."""
        modules = dict(self._container.named_modules(remove_duplicate=False))
        own = modules.get(name.rpartition(".")[0])
        return [path for path, module in modules.items() if module is own]

    def is_number(self, name: str, values: Iterable[object]) -> bool:
        """Whether values, None where there is none, are numbers or texts of a submodule."""
        path = name.rpartition(".")[0]
        is_of_module = path and any(path == each for each, _ in self._container.named_modules())
        return bool(is_of_module) and all(
            each is None or isinstance(each, PLAIN) for each in values
        )

    def contents(self, before: Mapping[str, object] = {}) -> dict[str, object]:
        """The numbers, texts, modes, hooks and submodules of the modules, by name, and what their
        tensors have apart from values; other objects may change by use.

        Modules that are all in evaluation have the modes of `before`, or train: programs evaluate
        with them.
        """
        found: dict[str, object] = {}
        for path, child in self._container.named_modules():
            found.update(_contents(f"{path}." if path else "", vars(child)))
        modes = [name for name in found if name.rpartition(".")[2] == "training"]
        if not any(found[name] for name in modes):  # `is_in_evaluation`
            found.update({name: before.get(name, True) for name in modes})
        for name, tensor in self.tensors.items():
            found[f"{name}.requires_grad"] = tensor.requires_grad
            hooks = {key: getattr(tensor, key) or {} for key in TENSOR_HOOKS}
            found.update(_contents(f"{name}.", {**vars(tensor), **hooks}))
        return found


def _parts(module: nn.Module) -> list[object]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _by_name(modules: nn.Module | Iterable[nn.Module]) -> dict[str, nn.Module]:
    is_other = not isinstance(modules, nn.Sequential | nn.ModuleList)
    if (is_other and isinstance(modules, nn.Module)) or not isinstance(modules, Iterable):
        raise ConfigError(
            f"sequential: {type(modules).__name__} is no list; give a list of modules, or a module "
            "with a forward of its own to ax.Trainer, with loss= (docs/howto/own-models.md, A "
            "module as it is)"
        )
    # named_children() would leave out a module that the Sequential contains a second time.
    named = (
        modules._modules.items()
        if isinstance(modules, nn.Sequential)
        else ((str(number), module) for number, module in enumerate(modules))
    )
    layers: dict[str, Any] = dict(named)
    for layer, module in layers.items():
        way = "give torch.nn.Modules, a function as the forward of one"
        check_kind(f"sequential: {layer}", module, nn.Module, way)
    return layers


def _reject_shared(layers: Mapping[str, nn.Module]) -> None:
    users: dict[Tensor, dict[str, str]] = {}
    for layer, module in layers.items():
        for name, tensor in named_tensors(module):
            users.setdefault(tensor, {}).setdefault(layer, name)
    for tensor, names in users.items():
        *others, last = names
        if others:
            is_pair, tie = len(others) == 1, ", or write the model as Layers with a Tie"
            raise ConfigError(
                f"sequential: {', '.join(others)} and {last} share {names[last]}, and could stand "
                f"on {'two' if is_pair else 'several'} stages; give each its own"
                f"{tie * (is_pair and isinstance(tensor, nn.Parameter))}"
            )


def structure(module: nn.Module, *, is_frozen: bool = False) -> nn.Module:
    """A copy of a module on the meta device, with all that the user has set; its tensors are not
    copied for this, and neither are hooks of other objects, such as recorders. No parameter of a
    frozen one is trained."""
    empty: dict[int, Any] = {
        id(parameter): like(parameter, parameter.detach().to("meta"))
        for parameter in module.parameters()
    }
    for buffer in module.buffers():
        empty[id(buffer)] = buffer.detach().to("meta")
        vars(empty[id(buffer)]).update(vars(buffer))
    made = _copied(module, empty)
    return made.requires_grad_(requires_grad=False) if is_frozen else made


def _copied(module: nn.Module, others: dict[int, Any]) -> nn.Module:
    """A copy of a module with other tensors, by the ids of its own, and the same hooks of other
    objects; `others` gets all that is copied, as `copy.deepcopy` notes it."""
    others.update({id(hook): hook for hook in hooks_of(module) if not holds_module(hook)})
    made: nn.Module = copy.deepcopy(module, others)
    return made


def copied_objects(module: nn.Module) -> list[object]:
    """All but the tensors of a module that a copy of it has anew."""
    noted: dict[int, Any] = {id(tensor): tensor for _, tensor in named_tensors(module)}
    _copied(module, noted)
    kept: list[object] = noted.get(id(noted), [])  # where copy.deepcopy keeps what it copies
    return kept


def frozen_in_training(module: nn.Module) -> set[str]:
    """The names of the modules that stay in evaluation when all others train, by a `train` of their
    own or of a module around them; what is given stays as it is. ConfigError if it cannot be
    copied."""
    if not any(map(has_own_train, module.modules())):
        return set()
    try:
        copied = structure(module)
    except Exception as reason:
        raise ConfigError(
            f"model: {type(module).__name__} is in evaluation and has a train() of its own, but "
            f"cannot be copied ({type(reason).__name__}: {reason}); call its train() before"
        ) from reason
    for child in copied.modules():
        child.training = True
    for child in reversed([*copied.modules()]):  # the outer ones decide
        if has_own_train(child):
            child.train()
    return {name for name, child in copied.named_modules() if not child.training}


@torch.no_grad()
def like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter of other values with a given one's class, attributes, hooks and memory order."""
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=values.dtype, device=values.device).copy_(values)
    made: Any = nn.Parameter(values, parameter.requires_grad)
    if type(parameter) is not nn.Parameter and issubclass(type(parameter), nn.Parameter):
        made = Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    vars(made).update(vars(parameter))
    for kind in TENSOR_HOOKS:
        hooks = getattr(parameter, kind)
        if hooks:
            setattr(made, kind, hooks.copy())
    found: nn.Parameter = made
    return found


def reject_uneven_hooks(names: Sequence[str], parameter: nn.Parameter) -> None:
    """ConfigError if the gradient hooks of a weight with several names, which plain torch calls
    with the sum of the gradients of its uses, are not linear: tried with some gradients."""
    if not parameter.requires_grad or not any(getattr(parameter, kind) for kind in TENSOR_HOOKS):
        return
    values = torch.zeros(parameter.shape) if parameter.is_meta else parameter.detach()
    generator = torch.Generator(values.device).manual_seed(0)

    def hooked(gradient: Tensor) -> Tensor:
        probe = like(parameter, values.clone())
        with torch.enable_grad():
            (probe * gradient).sum().backward()
        return torch.zeros_like(values) if probe.grad is None else probe.grad

    for size in (1e-4, 1.0, 1e4):
        one, other = (
            torch.randn(values.shape, generator=generator, device=values.device) * size
            for _ in range(2)
        )
        apart, together = hooked(one) + hooked(other), hooked(one + other)
        if not (apart - together).norm() <= 1e-3 * (apart.norm() + together.norm()):
            raise ConfigError(
                f"model: {' and '.join(names)} are one weight, and its gradient hooks are called "
                "for each of them, which is not the same here as for the sum of both gradients; "
                "take the hooks off, and clip by optimizer.clip_norm"
            )


def hooks_of(module: nn.Module) -> Iterator[object]:
    """The hooks of a module and of its submodules."""
    for child in module.modules():
        for kind in HOOKS:
            yield from vars(child)[kind].values()


def holds_module(hook: object) -> bool:
    """Whether a hook may read a module, as a method of it does: its copy then reads the copy."""
    if isinstance(hook, partial):
        return any(map(holds_module, (hook.func, *hook.args, *hook.keywords.values())))
    owner = getattr(hook, "__self__", hook)
    return any(
        isinstance(each, nn.Module) for each in (owner, *getattr(owner, "__dict__", {}).values())
    )


def is_compiled(module: object) -> bool:
    """Whether torch.compile has returned it; a name, since the class would import the compiler."""
    return type(module).__name__ == "OptimizedModule"


def _masked_share(module: nn.Module) -> float:
    """The share of zeros in trained matrices, and of what masks of torch.nn.utils.prune remove."""
    matrices = {n: p for n, p in module.named_parameters() if p.requires_grad and p.ndim >= 2}
    masks = dict(module.named_buffers())
    zeros = 0
    for name, matrix in matrices.items():
        zeros += int((masks.get(f"{name.removesuffix('_orig')}_mask", matrix) == 0).sum())
    return zeros / (sum(each.numel() for each in matrices.values()) or 1)  # all may be frozen


def reject_unfit(module: nn.Module, every: nn.Module | None = None) -> None:
    """ConfigError for a module that is compiled, has no values, or state that is no tensor; `every`
    has all modules of the model, where this is one of several."""
    reject_script(module)
    reject_lazy(f"model: {type(module).__name__}", module)
    for child in module.modules():
        if is_compiled(child) or child._compiled_call_impl is not None:
            raise ConfigError(
                f"model: {type(module).__name__} is compiled, and stages run copies of its layers; "
                "give it as it was before torch.compile, and set pipeline.compile: true"
            )
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            raise ConfigError(
                f"model: {type(child).__name__} has get_extra_state, and "
                "checkpoints keep tensors only; put it into a buffer, and leave get_extra_state out"
            )
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                kind = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
                given = "MODULE" if hook.name == "weight" else f'MODULE, "{hook.name}"'
                raise ConfigError(
                    f"model: {type(child).__name__} has a hook of torch.nn.utils.{kind}, which "
                    f"computes its {hook.name} before each forward; make it by torch.nn.utils."
                    f"parametrizations.{kind}, or call torch.nn.utils.remove_{kind}({given}) before"
                )
            if isinstance(hook, BasePruningMethod):
                is_matrix = getattr(child, hook._tensor_name).ndim >= 2
                stay = (
                    "its zeros stay by pruning.method: zeros, pruning.include: all and "
                    f"pruning.sparsity: {_masked_share(every or module):.3f}"
                )
                raise ConfigError(
                    f"model: {type(child).__name__} has a hook of torch.nn.utils.prune, which "
                    f"replaces its {hook._tensor_name} before each forward; call prune.remove("
                    f'MODULE, "{hook._tensor_name}") before; '
                    f"{stay if is_matrix else 'its zeros are trained, as of all vectors'}"
                )
        for name, value in vars(child).items():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    raise ConfigError(
                        f"model: {name!r} of {type(child).__name__} is a tensor that a forward or "
                        "another computation with weights has left, which cannot be copied; set it "
                        "to None before, or keep it detached (.detach())"
                    )
    if any(tensor.is_meta for _, tensor in named_tensors(module)):
        raise ConfigError(
            f"model: {type(module).__name__} is on the meta device, where nothing has values; "
            "make it with its values, or declare its layers (docs/howto/own-models.md)"
        )
    if (unfilled := unfilled_attribute(module)) is not None:
        raise ConfigError(
            f"model: {unfilled!r} of {type(module).__name__} is a tensor on the meta device, where "
            "nothing has values; give it some, or make it a buffer that load_state_dict fills"
        )


def reject_script(module: nn.Module) -> None:
    """ConfigError for a module of TorchScript, whose parameters have fixed places."""
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise ConfigError(
                f"model: {child.original_name} is a ScriptModule, whose weights cannot be "
                "replaced; give it as it was before torch.jit"
            )


def reject_lazy(where: str, module: nn.Module) -> None:
    """ConfigError for a parameter that a first forward is to give its shape."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"{where}: parameter {name!r} has no shape yet; give its module all sizes, instead "
                "of a lazy one"
            )


def _child(module: nn.Module) -> nn.Module:
    """The `structure` of a child of an `nn.Sequential`, which passes a tuple on as one argument."""
    return structure(module)


def reject_other_tuple(before: Layer, layer: Layer, count: int, kind: type) -> None:
    """ConfigError for two children of an `nn.Sequential` where the second could take the tuple that
    the first returns, and the `count` tensors in it, or where it takes one of another `kind`, such
    as a list."""
    build = layer.build
    if not isinstance(build, partial) or build.func is not _child:
        return
    [module] = build.args
    if takes(module, count) and takes(module, 1):
        way = "return the tensor" if count == 1 else f"let {layer.name} take one argument alone"
        raise ConfigError(
            f"sequential: {before.name} returns a tuple, which {layer.name} "
            f"({type(module).__name__}) would get as one argument from torch, and as its tensors "
            f"from a stage; {way}, or give ax.from_sequential(modules._modules, loss) to pass the "
            "tensors"
        )
    if kind is not tuple and takes(module, 1):
        raise ConfigError(
            f"sequential: {before.name} returns {kind.__name__}, which {layer.name} "
            f"({type(module).__name__}) would get as a plain tuple from a stage; return a tuple, "
            "and take its entries by number"
        )


def given_module(layer: Layer) -> nn.Module | None:
    """The user's own module of a layer of `from_sequential`, whose copy is trained; None if the
    layer builds its module, or that one has no values."""
    build = layer.build
    is_copied = isinstance(build, partial) and build.func in (structure, _child)
    return build.args[0] if isinstance(build, partial) and is_copied else None


class Snapshot:
    """The modules that a model copies, as they were when it copied them."""

    def __init__(self, start: OwnValues) -> None:
        self._start = start
        self._values = {name: (version(one), _digest(one)) for name, one in start.tensors.items()}
        self._contents = start.contents()
        self._looks = 0

    def change(
        self, may_have: Callable[[str, Tensor], bool], may_be_set: Callable[[str, object], bool]
    ) -> str | None:
        """The name of what has changed since; None if nothing has. `may_have(name, tensor)` says
        whether a tensor may have its new values, and `may_be_set(name, value)` whether a number or
        text may be another than `value`, which is None where there was none.

        Torch does not count writes to `.data`, which the 1st, 2nd, 4th, 8th, … look finds.
        """
        before, now = self._contents, self._start.contents(self._contents)
        for name in () if now == before else (*before, *now):
            values = before.get(name), now.get(name)
            is_free = name in self._start.written or (
                self._start.is_number(name, values) and may_be_set(name, values[0])
            )
            if values[0] != values[1] and not is_free:
                return name
        self._looks += 1
        looks_at_all = self._looks & (self._looks - 1) == 0
        buffers = self._start.buffers()
        for name, given in self._start.tensors.items():
            tensor, (seen, digest) = buffers.get(name, given), self._values[name]
            if looks_at_all or tensor is not given or version(tensor) != seen:
                found = _digest(tensor)
                if found != digest and not may_have(name, tensor):
                    return name
                self._values[name] = version(tensor), found
        return None


def _digest(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        return b""
    return xxhash.xxh3_128_digest(bytes_of(tensor.detach().cpu()).numpy().data)


PLAIN = (bool, int, float, str, np.bool_, np.integer, np.float16, np.float32)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
PARTS = {*TENSOR_HOOKS, *(name for name, value in vars(nn.Module()).items() if value == {})}
"""Attributes of torch's own that hold parameters, buffers, submodules and hooks by name."""


def _contents(prefix: str, attributes: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Numbers and texts among attributes by name, the names of buffers, and which parameters,
    submodules and hooks there are."""
    for name, value in attributes.items():
        if isinstance(value, PLAIN):
            yield prefix + name, value
        elif name == "_buffers" and isinstance(value, dict):
            yield prefix + name, [*value]
        elif name in PARTS and value and isinstance(value, dict):
            yield prefix + name, [*map(id, value.values())]


def is_in_evaluation(model: Model) -> bool:
    """Whether a model is made of modules that are all in evaluation mode, as from_pretrained
    returns them: a run then trains all."""
    given = [module for layer in model.layers if (module := given_module(layer)) is not None]
    modes = [child.training for module in given for child in module.modules()]
    return bool(modes) and not any(modes)


# -- the way back ------------------------------------------------------------------------


class PlainModel(nn.Sequential):
    """The modules of all layers in order, by the names of the layers."""

    def forward(self, *inputs: Tensor) -> Any:
        """The output of the last layer, a tensor or a tuple, for the inputs of the first."""
        output: Any = inputs
        for module in self:
            given = output if isinstance(output, (tuple, list)) else (output,)
            output = module(*as_arguments(module, given))
        return output


def reject_dotted_names(model: Model) -> None:
    """ConfigError for a layer whose name no submodule of torch can have."""
    for layer in model.layers:
        if "." in layer.name:
            raise ConfigError(
                f"layer {layer.name}: torch's modules have no dots in their names; name it "
                "otherwise, or take trainer.state_dict()"
            )


def filled_modules(model: Model, ties: Ties, tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """The modules of the layers with these parameters and buffers, in evaluation mode, by the names
    of the layers.

    `tensors` has all of them by global name, a tied weight under the name of its first use, which
    both uses then share.
    """
    made: dict[str, nn.Module] = {}
    owners: dict[str, nn.Parameter] = {}
    for layer in model.layers:
        module = on_meta(layer)
        for slot in slots(module):
            if slot.persists or slot.tensor.is_meta:  # Others have been computed by `build`.
                slot.put(tensors[layer.full_name(slot.name)])
        filled: dict[int, nn.Parameter] = {}
        for local, empty in module.named_parameters():
            name = layer.full_name(local)
            owner = ties.get(name, name)
            if owner not in owners:
                owners[owner] = like(empty, tensors[owner])
            filled[id(empty)] = owners[owner]
        for child in module.modules():  # a parameter may stand in several of them
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    child._parameters[key] = filled[id(parameter)]
        set_mode(module, training=False)
        made[layer.name] = module
    return made


def plain_model(model: Model, ties: Ties, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model with these parameters and buffers in evaluation mode, as one module: a copy of its
    container, or a `PlainModel` of what `filled_modules` makes."""
    if model.container is not None:
        return _filled_copy(model.container, tensors)
    plain = PlainModel(OrderedDict(filled_modules(model, ties, tensors)))
    plain.training = False  # as the modules are
    return plain


def with_numbers(module: nn.Module, numbers: Mapping[str, object]) -> nn.Module:
    """The module, with these numbers and texts of its submodules, by path and attribute."""
    children = dict(module.named_modules())
    for name, value in numbers.items():
        path, _, key = name.rpartition(".")
        if path in children:
            children[path].__dict__[key] = value
    return module


def _filled_copy(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module with these tensors, by all names that a shared one has."""
    filled: dict[int, Any] = {
        id(parameter): like(parameter, tensors[name])
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name in tensors
    }
    for slot in slots(module):
        if slot.name in tensors:
            filled[id(slot.tensor)] = tensors[slot.name]
            vars(tensors[slot.name]).update(vars(slot.tensor))
    copied = _copied(module, filled)
    set_mode(copied, training=False)
    return copied
