"""One forward of a module, watched: the calls of members of its lists, and which tensors pass from
one call to the next."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from traceback import walk_stack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from axsparse.models.module_buffers import state_of

Name = tuple[str, int, int]
"""A tensor that passes from layer to layer: ("input", its number, 0), ("size", the number of an
input, 0), which is empty and of the input's shape behind a first dimension of 0, ("argument", call,
leaf), made by the segment before that call, ("output", call, leaf), or ("shape", call, leaf), which
is to an output as a size to an input."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
CONSTANTS = (bool, int, float, str, torch.dtype, type(None), MappingProxyType)
"""Types of arguments other than tensors."""


@dataclass
class Call:
    """One call of a member of a list."""

    path: str
    key: str
    """The member's name in the list."""
    leaves: list[Any] = field(default_factory=list)
    """The arguments; in the place of tensors None, once the layers are made."""
    spec: Any = None
    outputs: list[Any] = field(default_factory=list)
    """The result, as the arguments."""
    output_spec: Any = None
    keeps_shape: list[bool] = field(default_factory=list)
    """Whether each output is a tensor of the shape and type of the argument in its place."""
    is_shapes: bool = False
    """Whether the result has nothing that changes with the inputs but tensors."""
    is_tensor: list[bool] = field(default_factory=list)
    """Whether each output is a tensor."""
    has_gradients: bool = field(default_factory=lambda: is_recorded())
    """Whether autograd records it, as it does outside `torch.no_grad()`."""
    is_direct: bool = field(default_factory=torch.is_grad_enabled)
    """Whether autograd records it without a function around it."""
    is_autocast: bool = field(default_factory=lambda: torch.is_autocast_enabled("cpu"))
    """Whether it runs in `torch.autocast`."""
    trains: bool = False
    """Whether the member is in training mode."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def has_numbers(self) -> bool:
        """Whether a number is among the arguments, which may depend on the shape of the inputs."""
        return any(type(leaf) in (int, float) for leaf in self.leaves)

    @property
    def has_choices(self) -> bool:
        """Whether a bool or a text is among the arguments, which may depend on shapes as well."""
        return any(type(leaf) in (bool, str) for leaf in self.leaves)

    def end(self, result: Any) -> None:
        self.outputs, self.output_spec = tree_flatten(result)
        self.is_tensor = [isinstance(each, Tensor) for each in self.outputs]
        self.is_shapes = all(
            isinstance(each, (Tensor, *CONSTANTS)) and type(each) not in (int, float)
            for each in self.outputs
        )
        self.keeps_shape = [
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and (one.shape, one.dtype) == (other.shape, other.dtype)
            for one, other in zip_longest(self.outputs, self.leaves[: len(self.outputs)])
        ]


class Apart(Exception):  # noqa: N818 - the choice of lists goes on without one of them
    """Some lists are not run one member after the other."""

    def __init__(self, why: str, calls: Sequence[Call] = ()) -> None:
        super().__init__(why)
        self.why = why
        self.paths = {call.path for call in calls}


class Watch(TorchFunctionMode):
    """The calls of the members of some lists in one forward, and what the segments around them read
    and make.

    Segment `number` lies before call `number`, the last one behind all calls. Tensors that are free
    can be computed anew anywhere, so that none is passed on.
    """

    def __init__(
        self,
        module: nn.Module,
        lists: Sequence[str],
        *,
        others: Sequence[str] = (),
        is_free: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        """Lists are given by path, the largest one last; calls in `others` are noted only."""
        super().__init__()
        self.calls: list[Call] = []
        self.arguments: list[list[Name | None]] = []
        """The names of each call's arguments; None for constants and free tensors."""
        self.others: list[tuple[int, Call]] = []
        """The calls of members of other lists, each with its segment."""
        self.used: list[dict[Name, None]] = [{}]
        self.owned: list[dict[int, None]] = [{}]
        """The parameters and buffers that each segment reads, by id."""
        self.exists = [False]
        self.result: Any = None
        self._module, self._lists, self._is_free = module, lists, is_free
        self._members = [
            (path, key, member)
            for path in (*lists, *others)
            for key, member in module.get_submodule(path)._modules.items()
            if member is not None
        ]
        self._state = {id(tensor) for _, tensor in state_of(module)}
        self._now: Call | None = None
        self._names: dict[int, Name] = {}
        self._born: dict[int, int] = {}
        """The segments that have made all other tensors."""
        self._kept: list[Tensor] = []
        """All tensors, so that no two of them are one object."""

    def run(self, *inputs: Tensor, **more: Any) -> Watch:
        """Watch a forward; `Apart` if the members of the lists do not run one after the other."""
        given = [*inputs, *tensors_of(more)]
        self._names = {id(tensor): ("input", n, 0) for n, tensor in enumerate(given)}
        hooks: list[Any] = []
        for path, key, member in self._members:
            begin, end = partial(self._begin, path, key), partial(self._end, path, key)
            hooks.append(member.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(member.register_forward_hook(end))
        try:
            with self:
                self.result = self._module(*inputs, **more)
        finally:
            for hook in hooks:
                hook.remove()
        self._reject_other_order()
        results = tensors_of(self.result)
        self._read(results)
        last = self.calls[-1].outputs if self.calls else []
        self.exists[-1] |= len(results) != 1 or not any(results[0] is each for each in last)
        self._kept.clear()
        return self

    def forget(self) -> None:
        """Keep no tensor of the forward."""
        self.result = None
        for call in self.calls:
            for values in (call.leaves, call.outputs):
                values[:] = [None if isinstance(value, Tensor) else value for value in values]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [args[0]] if func is Tensor.__setitem__ else tensors_of(result)
        used = tensors_of((args, kwargs))
        self._kept += made + used
        if made and self._now is not None and self._now.path in self._lists:
            self._reject_not_given(self._now, used)
        elif made:
            self._read(used)
            self.exists[-1] = True
            for tensor in made:
                if id(tensor) not in self._state:
                    self._names.pop(id(tensor), None)
                    self._born[id(tensor)] = len(self.calls)
        return result

    def _read(self, tensors: Sequence[Tensor]) -> None:
        """The segment under way reads these."""
        now = len(self.calls)
        for tensor in tensors:
            name, born = self._names.get(id(tensor)), self._born.get(id(tensor), now)
            if id(tensor) in self._state:
                self.owned[-1][id(tensor)] = None
            elif self._is_free(tensor):
                continue
            elif name is not None:
                self._reject_skip(name, now)
                self.used[-1][name] = None
            elif born != now:
                self._reject_unseen(born)

    def _begin(self, path: str, key: str, member: nn.Module, args: Any, kwargs: Any) -> None:
        if self._now is not None:
            return
        self._now = call = Call(path, key, *tree_flatten(as_constants((args, kwargs))))
        call.trains = member.training
        self._kept += tensors_of(call.leaves)
        number, names = len(self.calls), list[Name | None]()
        if path not in self._lists:
            self.others.append((number, call))
            return
        for leaf, value in enumerate(call.leaves):
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise Apart(f"{call.name} is given a {type(value).__name__}", [call])
            if not isinstance(value, Tensor) or self._is_free(value):
                names.append(None)
                continue
            if id(value) not in self._names:
                self._read([value])
                self._names[id(value)] = ("argument", number, leaf)
                self.exists[-1] = True
            self._reject_skip(self._names[id(value)], number)
            names.append(self._names[id(value)])
        self.calls.append(call)
        self.arguments.append(names)
        self.used.append({})
        self.owned.append({})
        self.exists.append(False)

    def _end(self, path: str, key: str, *given: Any) -> None:
        call = self._now
        if call is None or (call.path, call.key) != (path, key):
            return
        call.end(given[-1])
        self._now = None
        for leaf, value in enumerate(call.outputs if path in self._lists else ()):
            if isinstance(value, Tensor):
                self._names[id(value)] = ("output", len(self.calls) - 1, leaf)

    def _reject_not_given(self, call: Call, used: Sequence[Tensor]) -> None:
        for tensor in used:
            is_known = id(tensor) in self._names or id(tensor) in self._born
            if is_known and not any(tensor is leaf for leaf in call.leaves):
                raise Apart(f"{call.name} reads a tensor that it is not given", [call])

    def _reject_skip(self, name: Name, now: int) -> None:
        """`Apart` where a tensor with a name is read again behind too many calls."""
        kind, number, _ = name
        between = self.calls[number:now]
        if kind == "output" and len(between) > 1:
            why = f"the result of {between[0].name}"
        elif kind == "argument" and number and len({call.path for call in between}) > 1:
            why = f"what {between[0].name} is given"
        elif kind == "input" and any(call.path != self._lists[-1] for call in self.calls):
            why, between = "an input", self.calls
        else:
            return
        raise Apart(f"{why} is used again behind {between[-1].name}", between)

    def _reject_unseen(self, born: int) -> None:
        where = f"behind {self.calls[born - 1].name}" if born else f"before {self.calls[0].name}"
        raise Apart(
            f"what its forward computes {where} is used again behind {self.calls[-1].name}, which "
            "does not get it",
            self.calls[born:],
        )

    def _reject_other_order(self) -> None:
        for path in self._lists:
            keys = [*self._module.get_submodule(path)._modules]
            called = [call.key for call in self.calls if call.path == path]
            of_list = [Call(path, "")]
            for key in keys:
                if called.count(key) != 1:
                    name = Call(path, key).name
                    raise Apart(f"{name} runs {called.count(key)} times", of_list)
            if called != keys:
                raise Apart(f"{path or 'it'} runs in the order {', '.join(called)}", of_list)


def is_recorded() -> bool:
    """Whether autograd records what runs now, or a function of autograd runs it, such as a
    checkpoint, whose backward does."""
    return torch.is_grad_enabled() or any(
        isinstance(frame.f_locals.get("ctx"), FunctionCtx) for frame, _ in walk_stack(None)
    )


def as_constants(arguments: Arguments) -> Arguments:
    """The same arguments, with empty mappings as ones that no layer can write to."""
    given: Arguments = tree_map_only(
        MutableMapping, lambda each: each or MappingProxyType({}), arguments
    )
    return given


def tensors_of(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
