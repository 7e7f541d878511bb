"""Stand-ins for the layers of a module in its own forward, and modules of its parts.

`zoo/hf_forward` cuts the causal language models of transformers with these, `own_forward` any
other module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from axsparse.models.layer import Kind


class Reached(Exception):  # noqa: N818 - it ends a forward, and is no error
    """A forward has come to the layer before which it is to end."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given
        """The arguments of the layer."""


class StandIn(nn.Module):
    """Stands in the list of layers in the place of one; other attributes are the layer's own."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        vars(self)["_layer"] = layer
        vars(self)["_run"] = run

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the arguments to the function."""
        return self._run(*args, **kwargs)


@dataclass(frozen=True)
class Part:
    """A layer of axsparse: some modules of the model, and the function that runs them."""

    name: str
    """The path of the module, or of the parent that all the modules have."""
    modules: Mapping[str, nn.Module]
    """The modules on the meta device, by their names in the parent."""
    is_single: bool
    """Whether `name` is the path of the only module."""
    kind: Kind
    forward: Callable[..., tuple[Tensor, ...]]
    """`forward(modules by name, inputs…)` returns the outputs of the layer."""
    group: int | None = None
    """Equal in parts of one model that differ in values and names alone; None: in no other."""

    def is_like(self, other: Part) -> bool:
        """Whether both parts have the same shapes and costs."""
        return self.group is not None and self.group == other.group


class PartModule(nn.Module):
    """The module of a part: it has the parameters and submodules of the part's own modules.

    Of a single module it shares the dictionaries of parameters, buffers and submodules, so that
    names stay as in the model's state dict.
    """

    def __init__(self, part: Part, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if part.is_single:
            [module] = modules.values()
            for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(self)[kind] = vars(module)[kind]
        else:
            for name, module in modules.items():
                self.add_module(name, module)
        vars(self)["_parts"] = dict(modules)
        vars(self)["_run"] = part.forward

    def forward(self, *inputs: Tensor) -> Any:
        """The outputs of the part for its inputs."""
        parts, run = vars(self)["_parts"], vars(self)["_run"]
        for module in parts.values():
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


def are_alike(one: object, other: object) -> bool:
    """Whether two values are equal: modules by class and attributes, except the number that a
    layer of transformers has; tensors by shape and type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        first, second = ((t.shape, t.dtype, t.requires_grad) for t in (one, other))
        return first == second
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):
        return are_alike({**vars(one), "layer_idx": 0}, {**vars(other), "layer_idx": 0})
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_alike(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return one is other or (isinstance(one, (bool, int, float, str, set)) and one == other)


def tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """The names of each two parameters that are one weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(uses[0], later) for uses in names.values() for later in uses[1:]]
