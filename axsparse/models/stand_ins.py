"""Stand-ins for the layers of a module in its own forward, and modules of its parts.

`zoo/hf_forward` cuts the causal language models of transformers with these and what
`watched_forward` finds, `own_forward` any other module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor, nn

Modules: TypeAlias = Mapping[str, nn.Module]
"""The modules of a layer, by their names in their parent."""


class Reached(Exception):  # noqa: N818 - it ends a forward, and is no error
    """A forward has come to the layer before which it is to end."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given


def run_until_reached(module: nn.Module, *inputs: Any, **more: Any) -> tuple[Any, bool]:
    """The result of a forward and True, or what the layer at which it ends gets, and False."""
    try:
        return module(*inputs, **more), True
    except Reached as reached:
        return reached.given, False


def view_of(module: nn.Module) -> nn.Module:
    """A shallow copy of a module; methods that were set on the module run the copy."""
    view = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(view)[name] = MethodType(value.__func__, view)
    return view


def with_modules(module: nn.Module, others: Mapping[str, nn.Module | None]) -> nn.Module:
    """A `view_of` a module that has other modules as some of its children."""
    view = view_of(module)
    vars(view)["_modules"] = {**module._modules, **others}
    return view


class StandIn(nn.Module):
    """Stands in the list of layers in the place of one; other attributes are the layer's own."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        vars(self)["_layer"] = layer
        vars(self)["_run"] = run

    def __getattr__(self, name: str) -> Any:
        if name == "__deepcopy__":  # of a parametrized layer, which would copy the layer
            raise AttributeError(name)
        return getattr(vars(self)["_layer"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of a layer of the user's, for an `isinstance` around its call. Classes of torch
        stay out: torch's own forwards choose ways by them that look into the layer."""
        kind = type(vars(self)["_layer"])
        others = [base for base in kind.__mro__ if base is not nn.Module]
        return StandIn if any(base.__module__.startswith("torch.") for base in others) else kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class PartModule(nn.Module):
    """The module of a layer of axsparse: some modules of a model, and the function that runs them.

    It has the parameters and submodules of its modules. Of a single module it shares the
    dictionaries of parameters, buffers and submodules, so that names stay as in the model's state
    dict.
    """

    can_compile = True
    """Whether torch.compile can trace the function."""

    def __init__(self, modules: Modules, run: Callable[..., tuple[Any, ...]], *, is_single: bool):
        """`run(modules, inputs…)` returns the outputs of the layer."""
        super().__init__()
        if is_single:
            [module] = modules.values()
            for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(self)[kind] = vars(module)[kind]
        else:
            for name, module in modules.items():
                self.add_module(name, module)
        vars(self)["_parts"], vars(self)["_run"] = dict(modules), run

    def forward(self, *inputs: Tensor) -> Any:
        parts, run = vars(self)["_parts"], vars(self)["_run"]
        for name, module in parts.items():
            if self._modules.get(name) is not module:
                module.training = self.training
        outputs = run(parts, *inputs)
        return outputs[0] if len(outputs) == 1 else outputs


def outermost_lists(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, nn.Module]:
    """The modules of some kinds that have children and lie in no other such module, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and isinstance(module, kinds) and len(module._modules) and not inside:
            found[path] = module
    return found


def are_alike(one: object, other: object, around: frozenset[int] = frozenset()) -> bool:
    """Whether two values are equal: modules by class and attributes, but for numbers of layers,
    tensors by shape, type and hooks, functions by their code and what they hold, others by their
    own comparison. `around` has the modules that lie around the first one."""
    if one is other or id(one) in around:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module) and isinstance(other, nn.Module):
        return are_alike(_attributes(one), _attributes(other), around | {id(one)})
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        # Keys of hooks are numbers that count all hooks.
        first, second = ([key for key in each if not isinstance(key, int)] for each in (one, other))
        return first == second and are_alike([*one.values()], [*other.values()], around)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(are_alike(*pair, around) for pair in pairs)
    if isinstance(one, Tensor | partial | MethodType | FunctionType):
        return are_alike(_facts(one), _facts(other), around)
    try:
        return (one == other) is True  # numbers, texts, the configurations of transformers
    except Exception:  # The comparison of arrays is no truth.
        return False


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, less the number by which a layer of transformers finds its cache,
    and that by which a `PartModule` finds its arguments and its modules."""
    own = {name: value for name, value in vars(module).items() if name not in ("layer_idx", "_run")}
    return {**own, "_parts": [*own.get("_parts", {}).values()]}


def _facts(value: Any) -> list[object]:
    """The values in which two tensors or functions of a type differ, if they do."""
    if isinstance(value, Tensor):
        hooks = [value._backward_hooks, len(value._post_accumulate_grad_hooks or ())]
        return [tuple(value.shape), value.dtype, value.requires_grad, *hooks]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return [value.__code__, value.__defaults__, value.__kwdefaults__, cells]


def tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """The names of each two parameters that are one weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(uses[0], later) for uses in names.values() for later in uses[1:]]
