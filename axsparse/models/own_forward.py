"""A module with a forward of its own as a `Model`, cut by watching that forward.

One forward shows when it calls the members of its lists of modules, and which tensors pass from one
call to the next. Each member becomes a layer. What the forward does before, between and behind the
members becomes a layer too, a *segment*: the module's own forward again, in which all that other
layers compute runs on the meta device, with stand-ins for the members. The last stand-in before the
segment returns what has really come, and puts real contents in the place of the tensors that the
segment reads beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from axsparse.models.layer import Kind, Layer, LossFunction, MetricFunction, Model, Tie
from axsparse.models.module_buffers import named_tensors, replaced, slots
from axsparse.models.sequential import OwnValues, reject_unfit, structure
from axsparse.models.stand_ins import (
    Modules,
    Part,
    PartModule,
    Reached,
    StandIn,
    outermost_lists,
    tied_names,
)
from axsparse.runtime.errors import ConfigError, one_line
from axsparse.runtime.seeds import preserved_rng

Name = tuple[str, int, int]
"""A tensor that passes from layer to layer: ("input", its number, 0), ("size", the number of an
input, 0), which is empty and of the input's shape behind a first dimension of 0, ("argument", call,
leaf), made by the segment before that call, or ("output", call, leaf)."""
SMALL = 4
"""A list with this fraction of the largest one's parameters may be a part of a segment."""
BY_HAND = 'cut it by hand, as docs/howto/own-models.md shows under "A forward that is no sequence"'
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Within which the layers one after the other give what the module gives."""


def from_module(
    module: nn.Module,
    loss: LossFunction,
    example: Callable[[int], tuple[Tensor, ...]],
    *,
    metrics: Mapping[str, MetricFunction] = {},
) -> Model:
    """A model whose layers are the members of the module's lists, and what its forward does around
    them; `loss`, `metrics` and `example` are as in `Model`. An `nn.Sequential` with a forward of
    its own is such a list itself.

    The forward runs the members of one or more `nn.ModuleList` or `nn.Sequential` one after the
    other, each once. It is watched on `example(2)`, in its own mode. Global names are the module's
    own. The model starts at the values of the module, which are not changed by training.

    Raises ConfigError for a module that has no such forward.
    """
    reject_unfit(module)
    inputs = _as_wide(example(2), module)
    modes = [(child, child.training) for child in module.modules()]
    buffers = [(slot, slot.tensor.clone()) for slot in slots(module)]
    with torch.no_grad(), preserved_rng(), replaced(buffers):
        try:
            if not any(mode for _, mode in modes):
                module.train()  # as `is_in_evaluation` has it
            watch = _watched(module, inputs)
            _set_back(modes)
            layers, parts = _Split(module, _chosen(module, watch, inputs), inputs).layers()
            modes += [(child, child.training) for part in parts for child in part.modules()]
            _reject_other_result(module, parts, inputs)
        finally:
            _set_back(modes)
    tensors = {
        layer.full_name(name): tensor
        for layer, part in zip(layers, parts, strict=True)
        for name, tensor in named_tensors(part)
    }
    order = {name: number for number, name in enumerate(tensors)}
    ties = [
        sorted(pair, key=order.__getitem__) for pair in tied_names(module) if {*pair} <= {*order}
    ]
    return Model(
        layers,
        loss,
        ties=[Tie(*pair) for pair in ties],
        name=type(module).__name__.lower(),
        metrics=metrics,
        example=example,
        start=OwnValues(tensors, module),
        container=module,
    )


def _set_back(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for child, mode in modes:
        child.training = mode


# -- one forward ------------------------------------------------------------------------------


@dataclass
class _Call:
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
    keeps_shape: bool = False
    """Whether the result is one tensor like the first argument."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def has_numbers(self) -> bool:
        """Whether a number is among the arguments, which may depend on the shape of the inputs."""
        return any(type(leaf) in (int, float) for leaf in self.leaves)

    def end(self, result: Any) -> None:
        self.outputs, self.output_spec = tree_flatten(result)
        first, *_ = *self.leaves, None
        self.keeps_shape = (
            [*map(type, self.outputs)] == [Tensor]
            and isinstance(first, Tensor)
            and (first.shape, first.dtype) == (self.outputs[0].shape, self.outputs[0].dtype)
        )

    def forget(self) -> None:
        """Keep no tensor of the forward that was watched."""
        for values in (self.leaves, self.outputs):
            values[:] = [None if isinstance(value, Tensor) else value for value in values]


@dataclass
class _Event:
    """The begin or the end of a call, or an operation that makes tensors."""

    kind: str
    call: _Call | None
    """The call that begins or ends, or that the operation is of."""
    used: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)


class _Watch(TorchFunctionMode):
    """Notes all operations and calls. Tensors are kept, so that no two of them are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Event] = []
        self.result: Any = None
        self._now: _Call | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [args[0]] if func is Tensor.__setitem__ else _tensors(result)
        if made:
            self.events.append(_Event("op", self._now, _tensors((args, kwargs)), made))
        return result

    def begin(self, path: str, key: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._now is None:
            leaves, spec = tree_flatten((args, kwargs))
            self._now = _Call(path, key, leaves, spec)
            self.events.append(_Event("begin", self._now))

    def end(self, path: str, key: str, *given: Any) -> None:
        now = self._now
        if now is not None and (now.path, now.key) == (path, key):
            now.end(given[-1])
            self.events.append(_Event("end", now))
            self._now = None


def _watched(module: nn.Module, inputs: Sequence[Tensor]) -> _Watch:
    watch, hooks = _Watch(), []
    for path, members in _lists(module).items():
        for key, member in members._modules.items():
            if member is not None:
                begin, end = partial(watch.begin, path, key), partial(watch.end, path, key)
                hooks.append(member.register_forward_pre_hook(begin, with_kwargs=True))
                hooks.append(member.register_forward_hook(end))
    try:
        with watch:
            watch.result = module(*inputs)
    except Exception as reason:
        given = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in inputs)
        why = f"its forward fails on two samples, {given} ({one_line(reason)})".replace(
            "torch.", ""
        )
        raise _unfit(module, why, "give samples that it takes (data=), or correct it") from reason
    finally:
        for hook in hooks:
            hook.remove()
    return watch


def _lists(module: nn.Module) -> dict[str, nn.Module]:
    """The lists whose members may be layers, by path."""
    if isinstance(module, nn.Sequential):
        return {"": module}
    outermost = outermost_lists(module, nn.ModuleList, nn.Sequential)
    return {
        path: found
        for outer, each in outermost.items()
        for path, found in _innermost(outer, each)
        if not isinstance(found, nn.Sequential) or type(found).forward is nn.Sequential.forward
    }


def _innermost(path: str, found: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A list, or the lists of a list that has nothing but `nn.ModuleList`s, which do not run."""
    members = dict(found.named_children())
    if members and all(isinstance(member, nn.ModuleList) for member in members.values()):
        for name, member in members.items():
            yield from _innermost(f"{path}.{name}" if path else name, member)
    else:
        yield path, found


# -- where it is cut --------------------------------------------------------------------------


class _Apart(Exception):  # noqa: N818 - the choice of lists goes on without one of them
    """Some lists are not run one member after the other."""

    def __init__(self, why: str, calls: Sequence[_Call]) -> None:
        super().__init__(why)
        self.why = why
        self.paths = {call.path for call in calls}


class _Timeline:
    """The calls of the members of some lists, and what the segments around them read and make.

    Segment `number` lies before call `number`, the last one behind all calls. `_Apart` for lists
    whose members do not run one after the other.
    """

    def __init__(self, module: nn.Module, watch: _Watch, lists: Sequence[str], inputs: Any) -> None:
        self.calls: list[_Call] = []
        self.arguments: list[list[Name | None]] = []
        """The names of each call's arguments; None for a constant."""
        self.used: list[dict[Name, None]] = [{}]
        self.owned: list[dict[int, None]] = [{}]
        """The parameters and buffers that each segment reads, by id."""
        self.exists = [False]
        self._lists = lists
        self._state = {id(tensor) for _, tensor in _state(module)}
        self._names: dict[int, Name] = {
            id(tensor): ("input", number, 0) for number, tensor in enumerate(inputs)
        }
        self._born: dict[int, int] = {}
        """The segments that have made all other tensors."""
        for event in watch.events:
            if event.call is None or event.call.path not in lists:
                if event.kind == "op":
                    self._operation(event)
            elif event.kind == "begin":
                self._begin(event.call)
            elif event.kind == "end":
                self._end(event.call)
            else:
                self._inside(event)
        self._reject_other_order(module)
        results = _tensors(watch.result)
        self._read(results)
        last = self.calls[-1].outputs if self.calls else []
        self.exists[-1] |= len(results) != 1 or not any(results[0] is each for each in last)

    def _operation(self, event: _Event) -> None:
        self._read(event.used)
        self.exists[-1] = True
        for tensor in event.made:
            if id(tensor) not in self._state:
                self._names.pop(id(tensor), None)
                self._born[id(tensor)] = len(self.calls)

    def _read(self, tensors: Sequence[Tensor]) -> None:
        """The segment under way reads these."""
        now = len(self.calls)
        for tensor in tensors:
            name, born = self._names.get(id(tensor)), self._born.get(id(tensor), now)
            if id(tensor) in self._state:
                self.owned[-1][id(tensor)] = None
            elif name is not None:
                self._reject_skip(name, now)
                self.used[-1][name] = None
            elif born != now:
                self._reject_unseen(born)

    def _begin(self, call: _Call) -> None:
        number, names = len(self.calls), list[Name | None]()
        for leaf, value in enumerate(call.leaves):
            if not isinstance(value, Tensor):
                if not isinstance(value, bool | int | float | str | torch.dtype | None):
                    raise _Apart(f"{call.name} is given a {type(value).__name__}", [call])
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

    def _end(self, call: _Call) -> None:
        for leaf, value in enumerate(call.outputs):
            if isinstance(value, Tensor):
                self._names[id(value)] = ("output", len(self.calls) - 1, leaf)

    def _inside(self, event: _Event) -> None:
        call = event.call
        assert call is not None
        for tensor in event.used:
            is_known = id(tensor) in self._names or id(tensor) in self._born
            if is_known and not any(tensor is leaf for leaf in call.leaves):
                raise _Apart(f"{call.name} reads a tensor that it is not given", [call])

    def _reject_skip(self, name: Name, now: int) -> None:
        """`_Apart` where a tensor with a name is read again behind too many calls."""
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
        raise _Apart(f"{why} is used again behind {between[-1].name}", between)

    def _reject_unseen(self, born: int) -> None:
        where = f"behind {self.calls[born - 1].name}" if born else f"before {self.calls[0].name}"
        raise _Apart(
            f"what its forward computes {where} is used again behind {self.calls[-1].name}, which "
            "does not get it",
            self.calls[born:],
        )

    def _reject_other_order(self, module: nn.Module) -> None:
        for path in self._lists:
            keys = [*module.get_submodule(path)._modules]
            called = [call.key for call in self.calls if call.path == path]
            of_list = [_Call(path, "")]
            for key in keys:
                if called.count(key) != 1:
                    name = _Call(path, key).name
                    raise _Apart(f"{name} runs {called.count(key)} times", of_list)
            if called != keys:
                raise _Apart(f"{path or 'it'} runs in the order {', '.join(called)}", of_list)


def _chosen(module: nn.Module, watch: _Watch, inputs: Any) -> _Timeline:
    """The timeline of all lists that run one after the other with the largest one."""
    sizes = {
        path: sum(parameter.numel() for parameter in found.parameters())
        for path, found in _lists(module).items()
    }
    lists = sorted(sizes, key=sizes.__getitem__)
    for _ in sizes:
        try:
            return _Timeline(module, watch, lists, inputs)
        except _Apart as apart:  # noqa: PERF203
            least = next(path for path in lists if path in apart.paths)
            if least == lists[-1] or SMALL * sizes[least] > sizes[lists[-1]]:
                raise _unfit(module, apart.why) from None
            lists.remove(least)
    own = outermost_lists(module, nn.Sequential)
    if own:
        raise _unfit(module, f"{', '.join(own)} has a forward of its own, and runs as one")
    raise _unfit(module, "it has no nn.ModuleList or nn.Sequential")


# -- the layers -------------------------------------------------------------------------------


@dataclass
class _Run:
    """One run of the forward for a segment, or for the arguments of a call."""

    first: int
    """The segment's number: all before it runs on the meta device."""
    stop: int
    """The call before which the run ends."""
    values: Mapping[Name, Tensor]
    seen: dict[Name, Tensor]
    """The tensors on the meta device that the segment reads."""
    before: ExitStack
    """Is open before the segment."""


_RUN: ContextVar[_Run] = ContextVar("_RUN")


class _Split:
    """A module, and the layers that it is cut into."""

    def __init__(self, module: nn.Module, timeline: _Timeline, inputs: Sequence[Tensor]) -> None:
        self._module = module
        self._calls, self._arguments, self._used = timeline.calls, timeline.arguments, timeline.used
        self._dtypes = [tensor.dtype for tensor in inputs]
        self._lists = {call.path for call in self._calls}
        self._meta = structure(module).requires_grad_(requires_grad=False)
        self._put_stand_ins()
        self._owned = self._owners(timeline)
        self._items: list[tuple[str, int]] = []
        for number in range(len(self._calls) + 1):
            if timeline.exists[number] or self._owned[number]:
                self._items.append(("segment", number))
            self._items.append(("call", number))
        del self._items[-1]
        self._into = self._names_into(len(inputs))
        for call in self._calls:
            call.forget()

    def __deepcopy__(self, memo: object) -> _Split:
        """The modules of a layer are copied for each stage, and share what runs them."""
        return self

    def layers(self) -> tuple[list[Layer], list[PartModule]]:
        parts = [self._part(item) for item in range(len(self._items))]
        full = [number for number, (_, part) in enumerate(parts) if [*part.parameters()]]
        layers = []
        for number, ((prefix, part), name) in enumerate(
            zip(parts, self._item_names(), strict=True)
        ):
            kind: Kind = "head" if number in full[-1:] else "block"
            kind = "embedding" if self._items[number] == ("segment", 0) else kind
            layers.append(Layer(name, partial(structure, part), kind=kind, prefix=prefix))
        return layers, [part for _, part in parts]

    def _item_names(self) -> Iterator[str]:
        for kind, number in self._items:
            if kind == "call":
                yield self._calls[number].name
            elif number == len(self._calls):
                yield "head"
            else:
                yield f"behind.{self._calls[number - 1].name}" if number else "stem"

    def _part(self, item: int) -> tuple[str, PartModule]:
        """The prefix of a layer's global names, and its module."""
        kind, number = self._items[item]
        if kind == "segment":
            tree = self._tree(self._module, self._meta, self._owned[number], "")
            run, prefix, modules = partial(self._segment, item), "", {"": tree}
        else:
            call = self._calls[number]
            member = self._module.get_submodule(call.name)
            run, modules = partial(self._call, item), {call.key: member}
            prefix = call.name.removesuffix(call.key)
        part = PartModule(Part("", modules, kind == "segment", "block", run), modules)
        part.training = next(iter(modules.values())).training
        return prefix, part

    def _put_stand_ins(self) -> None:
        for path in self._lists:
            above, _, last = path.rpartition(".")
            parent, members = self._meta.get_submodule(above), self._meta.get_submodule(path)
            with_stand_ins = copy.copy(members)
            if path:
                parent._modules[last] = with_stand_ins
            else:
                self._meta = with_stand_ins
            vars(with_stand_ins)["_modules"] = {
                call.key: StandIn(member, partial(self._stand_in, number, member))
                for number, call in enumerate(self._calls)
                if call.path == path
                for member in [members.get_submodule(call.key)]
            }

    def _owners(self, timeline: _Timeline) -> list[set[str]]:
        """The names of the tensors that each segment has; the last one has what nothing reads."""
        outside: dict[int, list[str]] = {}
        for name, tensor in _state(self._module):
            if not any(
                name.startswith(f"{path}.") if path else "." in name for path in self._lists
            ):
                outside.setdefault(id(tensor), []).append(name)
        owned: list[set[str]] = [set() for _ in timeline.owned]
        there = [number for number, exists in enumerate(timeline.exists) if exists]
        for key, names in outside.items():
            readers = [number for number, reads in enumerate(timeline.owned) if key in reads]
            if not readers and not there:
                raise _unfit(self._module, f"its forward does not use {names[0]}")
            beside = [
                number
                for number in there
                for each, others in outside.items()
                if each in timeline.owned[number] and _above(others[0]) == _above(names[0])
            ]
            readers = readers or [(beside or there)[-1]]
            if len(readers) > max(1, len(names)):
                raise _unfit(self._module, f"its forward uses {names[0]} in {len(readers)} places")
            for number, name in zip(readers, names, strict=False):
                owned[number].add(name)
            owned[readers[-1]].update(names[len(readers) :])
        return owned

    def _names_into(self, inputs: int) -> list[list[Name]]:
        first: list[Name] = [("input", number, 0) for number in range(inputs)]
        sizes = [("size", number, 0) for number in range(inputs)]
        needs, makes = list[set[Name]](), list[list[Name]]()
        for kind, number in self._items:
            if kind == "segment":
                needs.append({*self._used[number], *(sizes if number else ())})
                following = self._arguments[number] if number < len(self._arguments) else ()
                made = [n for n in following if n is not None and n[:2] == ("argument", number)]
            else:
                needs.append({name for name in self._arguments[number] if name is not None})
                needs[-1].update(sizes if self._calls[number].has_numbers else ())
                made = [
                    ("output", number, leaf) for leaf in range(len(self._calls[number].outputs))
                ]
            makes.append([*dict.fromkeys(made)])
        into, known = [[*first]], [*first, *sizes]
        for item, made in enumerate(makes[:-1]):
            known += made
            later = set[Name]().union(*needs[item + 1 :])
            into.append([name for name in known if name in later])
        return into

    def _tree(self, module: nn.Module, meta: nn.Module, own: set[str], prefix: str) -> nn.Module:
        """A copy of a module with these tensors; all others are attributes on the meta device."""
        view = copy.copy(module)
        for kind in ("_parameters", "_buffers"):
            mine = {}
            for key, tensor in vars(module)[kind].items():
                if tensor is None or prefix + key in own:
                    mine[key] = tensor
                else:
                    vars(view)[key] = vars(meta)[kind][key]
            vars(view)[kind] = mine
        if not prefix and "" in self._lists:
            vars(view)["_modules"] = meta._modules
            return view
        children: dict[str, nn.Module | None] = {}
        for key, child in module._modules.items():
            if child is None:
                children[key] = None
                continue
            path, other = prefix + key, meta._modules[key]
            assert other is not None
            names = {f"{path}.{name}" for name, _ in _state(child)}
            has_list = any(f"{each}.".startswith(f"{path}.") for each in self._lists)
            if path in self._lists and isinstance(module, nn.ModuleList):
                children[key] = other  # which runs over its members
            elif path in self._lists or (names and not names & own and not has_list):
                vars(view)[key] = other
            elif names <= own and not has_list:
                children[key] = child
            else:
                children[key] = self._tree(child, other, own, f"{path}.")
        vars(view)["_modules"] = children
        return view

    # -- what they do -------------------------------------------------------------------------

    def _segment(self, item: int, modules: Modules, *tensors: Tensor) -> tuple[Any, ...]:
        [tree], (_, number) = modules.values(), self._items[item]
        values = self._values(item, tensors)
        result, is_end = self._ran(tree, number, number, values)
        if is_end:
            return result if isinstance(result, tuple) else (result,)
        for name, leaf in zip(self._arguments[number], result, strict=True):
            if name is not None and name[:2] == ("argument", number):
                values[name] = leaf
        return self._passed_on(item, values)

    def _call(self, item: int, modules: Modules, *tensors: Tensor) -> tuple[Any, ...]:
        [member], (_, number) = modules.values(), self._items[item]
        values, call = self._values(item, tensors), self._calls[number]
        leaves = call.leaves
        if call.has_numbers:
            leaves, _ = self._ran(self._meta, len(self._calls) + 1, number, values)
        given = [
            leaf if name is None else values[name]
            for leaf, name in zip(leaves, self._arguments[number], strict=True)
        ]
        args, kwargs = tree_unflatten(given, call.spec)
        output = member(*args, **kwargs)
        if item == len(self._items) - 1:
            return output if isinstance(output, tuple) else (output,)
        for leaf, tensor in enumerate(tree_leaves(output)):
            values["output", number, leaf] = tensor
        return self._passed_on(item, values)

    def _values(self, item: int, tensors: Sequence[Tensor]) -> dict[Name, Tensor]:
        values = dict(zip(self._into[item], tensors, strict=True))
        if item == 0:
            for number, tensor in enumerate(tensors):
                values["size", number, 0] = tensor.new_empty((0, *tensor.shape))
        return values

    def _passed_on(self, item: int, values: Mapping[Name, Tensor]) -> tuple[Tensor, ...]:
        return tuple(values[name] for name in self._into[item + 1])

    def _ran(
        self, tree: nn.Module, first: int, stop: int, values: Mapping[Name, Tensor]
    ) -> tuple[Any, bool]:
        """Run the forward from segment `first` on: what call `stop` is given and False, or the
        result and True."""
        inputs = [values.get(("input", number, 0)) for number in range(len(self._dtypes))]
        with ExitStack() as before:
            seen: dict[Name, Tensor] = {}
            if first:
                before.enter_context(_disable_current_modes())  # which count flops of this layer
                inputs = [
                    torch.empty(values["size", number, 0].shape[1:], dtype=dtype, device="meta")
                    for number, dtype in enumerate(self._dtypes)
                ]
                seen = {("input", n, 0): each for n, each in enumerate(inputs) if each is not None}
            token = _RUN.set(_Run(first, stop, values, seen, before))
            try:
                return tree(*inputs), True
            except Reached as reached:
                return reached.given, False
            finally:
                _RUN.reset(token)

    def _stand_in(self, number: int, member: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of a stand-in in the place of call `number`."""
        run, call, leaves = _RUN.get(), self._calls[number], tree_leaves((args, kwargs))
        if number == run.stop:
            raise Reached(leaves)
        for leaf, name in enumerate(self._arguments[number]):
            if name is not None:
                run.seen.setdefault(name, leaves[leaf])
        if number == run.first - 1:
            for name in self._used[run.first]:
                if name in run.seen:
                    value = run.values[name]
                    torch._C._swap_tensor_impl(run.seen[name], value.view_as(value))
            run.before.close()
            outputs = [
                run.values.get(("output", number, leaf), constant)
                for leaf, constant in enumerate(call.outputs)
            ]
            return tree_unflatten(outputs, call.output_spec)
        if call.keeps_shape:
            return torch.empty_like(leaves[0])
        return member(*args, **kwargs)


def _reject_other_result(
    module: nn.Module, parts: Sequence[nn.Module], inputs: Sequence[Tensor]
) -> None:
    """ConfigError where the layers in a row give another result than the module in evaluation."""
    for each in (module, *parts):
        each.eval()
    values: Any = inputs
    try:
        for part in parts:
            values = part(*values)
            values = values if isinstance(values, tuple) else (values,)
    except Exception as reason:
        why = f"its forward depends on more than what its blocks are given ({one_line(reason)})"
        raise _unfit(module, why) from reason
    for ours, theirs in zip(_tensors(values), _tensors(module(*inputs)), strict=True):
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, equal_nan=True, **CLOSE):
            raise _unfit(module, "its layers one after the other give another result")


def _as_wide(inputs: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
    """The inputs on the CPU, floating-point ones in the type of the parameters."""
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    return [each.to(dtype) if each.is_floating_point() else each for each in inputs]


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, those with several names under each."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _above(name: str) -> str:
    return name.rpartition(".")[0]


def _unfit(module: nn.Module, why: str, way: str = BY_HAND) -> ConfigError:
    if isinstance(module, nn.ModuleList):
        way = "give nn.Sequential(*modules) if each gets the result of the one before it"
    if hasattr(module, "save_pretrained"):
        way = "save it by save_pretrained(FOLDER), and give ax.hf(FOLDER) without loss="
    return ConfigError(f"model: {type(module).__name__} cannot be cut into layers: {why}; {way}")
