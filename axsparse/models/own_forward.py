"""A module with a forward of its own as a `Model`, cut by watching that forward.

One forward shows when it calls the members of its lists of modules, and which tensors pass from one
call to the next. Each member becomes a layer. What the forward does before, between and behind the
members becomes a layer too, a *segment*: the module's own forward again, in which all that other
layers compute runs on the meta device, with stand-ins for the members. The last stand-in before the
segment returns what has really come, and puts real contents in the place of the tensors that the
segment reads beside it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from axsparse.models.layer import Kind, Layer, LossFunction, MetricFunction, Model, Tie, as_tuple
from axsparse.models.model_profile import COPIABLE, example_of
from axsparse.models.module_buffers import (
    BufferSlot,
    named_tensors,
    replaced,
    same_attributes,
    slots,
    start_training,
    state_of,
    version,
)
from axsparse.models.sequential import (
    PLAIN,
    OwnValues,
    holds_module,
    reject_uneven_hooks,
    reject_unfit,
    structure,
)
from axsparse.models.stand_ins import (
    Modules,
    PartModule,
    Reached,
    StandIn,
    outermost_lists,
    run_until_reached,
    tied_names,
    view_of,
    with_modules,
)
from axsparse.models.watched_forward import (
    Apart,
    Call,
    Name,
    Watch,
    as_constants,
    is_recorded,
    tensors_of,
)
from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.errors import ConfigError, check_kind, one_line
from axsparse.runtime.seeds import preserved_rng, seed_all

SMALL = 4
"""A list with this fraction of the largest one's parameters may be a part of a segment."""
BY_HAND = 'cut it by hand, as docs/howto/own-models.md shows under "A forward that is no sequence"'
NO_AUTOCAST = "leave torch.autocast out around its blocks, and set precision"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Within which the layers one after the other give what the module gives."""
SAME_GRADIENT, NOISE = 0.02, 1e-5
"""The largest difference of two gradients of one parameter, relative to its largest entry and to
the largest one of all parameters: sums over uses in half precision differ by 1e-2."""


def from_module(
    module: nn.Module,
    loss: LossFunction,
    example: Callable[[int], tuple[Tensor, ...]],
    *,
    metrics: Mapping[str, MetricFunction] = {},
) -> Model:
    """A model whose layers are the members of the module's lists, and what its forward does around
    them; `loss`, `metrics` and `example` are as in `Model`. An `nn.Sequential` or `nn.ModuleList`
    with a forward of its own is such a list itself.

    The forward runs the members of one or more `nn.ModuleList` or `nn.Sequential` one after the
    other, each once. It is watched on `example(2)`, in its own mode. Global names are the module's
    own. The model starts at the values of the module, which are not changed by training.

    Raises ConfigError for a module that has no such forward.
    """
    check_kind("from_module: module", module, nn.Module, "give an nn.Module")
    reject_unfit(module)
    start_training(module)
    given = example_of(example, 2, "from_module: example")
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    inputs = [each.to(dtype) if each.is_floating_point() else each for each in given]
    cut, written = _cut(module, inputs)
    tensors = {
        layer.full_name(name): tensor
        for layer, part in cut.items()
        for name, tensor in named_tensors(part)
    }
    order = {name: number for number, name in enumerate(tensors)}
    ties = [
        sorted(pair, key=order.__getitem__) for pair in tied_names(module) if {*pair} <= {*order}
    ]
    for names in ties:
        reject_uneven_hooks(names, module.get_parameter(names[0]))
    return Model(
        [*cut],
        loss,
        ties=[Tie(*pair) for pair in ties],
        name=type(module).__name__.lower(),
        metrics=metrics,
        example=example,
        start=OwnValues(tensors, module, written),
        container=module,
    )


def _cut(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[dict[Layer, PartModule], set[str]]:
    """The layers of a module with their modules, and the names of numbers and texts that its
    forward writes; the module is left as it was."""
    given = [(slot, slot.tensor) for slot in slots(module)]
    buffers = [(slot, tensor.clone()) for slot, tensor in given]
    with torch.no_grad(), preserved_rng(), replaced(buffers):
        with _watched_writes(module, [module]) as written:
            if not any(child.training for child in module.modules()):  # `is_in_evaluation`
                for child in module.modules():  # not by its `train`, which may change more
                    child.training = True
            with _recorders(module) as recorders:
                watch = _watched(module, inputs)
        split = _Split(module, watch, inputs, recorders)
        layers = dict(zip(*split.layers(), strict=True))
        views = [
            view for part in layers.values() for view in (part, *vars(part)["_parts"].values())
        ]
        with _watched_writes(module, [module, *views]) as more:
            _reject_shared_changes(given, layers)
            _reject_other_result(module, watch.calls, layers, inputs)
            _reject_other_result(module, watch.calls, layers, inputs, [module, *views])
            split.is_example = False
    for layer, part in layers.items():  # which have the copies of buffers
        for slot in slots(part):
            slot.put(module.get_buffer(layer.full_name(slot.name)))
    return layers, written | more


@contextmanager
def _watched_writes(module: nn.Module, modules: Sequence[nn.Module]) -> Iterator[set[str]]:
    """The names of numbers and texts of a module that the code within has written; the attributes
    of some modules, which may also have the tensors of a graph, are put back."""
    values, written = OwnValues({}, module), set[str]()
    before = values.contents()
    with same_attributes(modules):
        yield written
        after = values.contents(before)
        changed = (name for name in after if after[name] != before.get(name))
        written.update(name for name in changed if isinstance(after[name], PLAIN))


FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""The attributes of a module that have the hooks of its forward."""


@contextmanager
def _recorders(module: nn.Module) -> Iterator[Set[tuple[str, str, int]]]:
    """The hooks that return nothing and write nothing to their module in what runs meanwhile, by
    path, kind and number; hooks that hold a module may write there."""
    found = [
        ((path, kind, key), vars(child)[kind], hook)
        for path, child in module.named_modules()
        for kind in FORWARD_HOOKS
        for key, hook in vars(child)[kind].items()
        if not holds_module(hook)
    ]
    recorders, others = set[tuple[str, str, int]](), set[tuple[str, str, int]]()

    def call(
        name: tuple[str, str, int], hook: Callable[..., Any], child: nn.Module, *given: Any
    ) -> Any:
        before = dict(vars(child))
        result = hook(child, *given)
        now = vars(child)
        is_same = now.keys() == before.keys() and all(now[key] is before[key] for key in now)
        (recorders if result is None and is_same else others).add(name)
        recorders.difference_update(others)
        return result

    for name, hooks, hook in found:
        hooks[name[2]] = partial(call, name, hook)
    try:
        yield recorders
    finally:
        for name, hooks, hook in found:
            if name[2] in hooks:
                hooks[name[2]] = hook


def _with_contents(hook: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
    """The result of a hook, which is not called with tensors on the meta device."""
    return None if any(each.is_meta for each in tensors_of(given)) else hook(module, *given)


def _reject_shared_changes(
    before: Sequence[tuple[BufferSlot, Tensor]], layers: Mapping[Layer, nn.Module]
) -> None:
    """ConfigError for a buffer of two layers that a forward has changed, such as the statistics of
    one batch norm, since the layers could stand on two stages. `before` has the contents that the
    buffers had."""
    for slot, content in before:
        # A cache may grow: each stage computes its own.
        if not slot.persists or bytes_of(slot.tensor).equal(bytes_of(content)):
            continue
        owners = {owner for owner, _ in slot.places}
        users = [layer.name for layer, part in layers.items() if owners & {*part.modules()}]
        if len(users) > 1:
            raise ConfigError(
                f"model: {' and '.join(users[:2])} share {slot.name}, which the forward changes, "
                "and could stand on two stages; give each its own"
            )


# -- where it is cut --------------------------------------------------------------------------


def _lists(module: nn.Module) -> dict[str, nn.Module]:
    """The lists whose members may be layers, by path."""
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    if is_list and not any(isinstance(member, nn.ModuleList) for member in module.children()):
        return {"": module}
    outermost = outermost_lists(module, nn.ModuleList, nn.Sequential)
    return {
        path: found
        for outer, each in outermost.items()
        if not isinstance(each, ParametrizationList)  # which runs where its weight is used
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


def _watched(module: nn.Module, inputs: Sequence[Tensor]) -> Watch:
    """The forward by all lists that run one after the other with the largest one."""
    sizes = {
        path: sum(parameter.numel() for parameter in found.parameters())
        for path, found in _lists(module).items()
    }
    lists, watch = sorted(sizes, key=sizes.__getitem__), None
    while watch is None:
        try:
            with torch.enable_grad():
                watch = Watch(module, lists).run(*_copies(inputs))
        except Apart as apart:  # noqa: PERF203
            least = next(path for path in lists if path in apart.paths)
            if least == lists[-1] or SMALL * sizes[least] > sizes[lists[-1]]:
                raise _unfit(module, apart.why) from None
            lists.remove(least)
        except Exception as reason:
            given = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in inputs)
            given = given.replace("torch.", "")
            why = f"its forward fails on two samples, {given} ({one_line(reason)})"
            raise _unfit(
                module, why, "give samples that it takes (data= or example), or correct it"
            ) from reason
    for call, is_read in zip(watch.calls, watch.exists[1:], strict=True):
        if is_read and call.has_gradients and not call.is_direct:
            why = f"its forward takes the result of {call.name}, in a reentrant checkpoint"
            raise _unfit(module, why, "give the checkpoint use_reentrant=False, or leave it out")
    if lists:
        return watch
    own = outermost_lists(module, nn.Sequential)
    if own:
        raise _unfit(module, f"{', '.join(own)} has a forward of its own, and runs as one")
    seen = {*module.modules()}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            listed = value if isinstance(value, list) else []
            if any(isinstance(each, nn.Module) and each not in seen for each in listed):
                full = f"{path}.{name}".lstrip(".")
                way = f"make it nn.ModuleList({name})"
                raise _unfit(module, f"{full} is a list, whose parameters torch does not see", way)
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
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)
    known: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """The inputs and all that calls are given and return, each with its version, by id."""
    outputs: list[Any] = field(default_factory=list)
    """The result of the last call."""
    called: int = 0
    """The number of calls so far."""

    def note(self, values: Sequence[Any]) -> None:
        """Note tensors, and the versions of all."""
        every = [*(tensor for tensor, _ in self.known.values()), *tensors_of(values)]
        self.known = {id(tensor): (tensor, version(tensor)) for tensor in every}

    def has(self, tensor: Tensor) -> bool:
        return id(tensor) in self.known

    def has_written_to(self, tensor: Tensor) -> bool:
        """Whether a noted tensor has been written to since."""
        return self.known[id(tensor)][1] != version(tensor)


_RUN: ContextVar[_Run] = ContextVar("_RUN")


class _Split:
    """A module, and the layers that it is cut into."""

    def __init__(
        self,
        module: nn.Module,
        watch: Watch,
        inputs: Sequence[Tensor],
        recorders: Set[tuple[str, str, int]],
    ) -> None:
        self._module, self._recorders = module, recorders
        self._calls, self._arguments, self._used = watch.calls, watch.arguments, watch.used
        self._dtypes = [tensor.dtype for tensor in inputs]
        self._lists = {call.path for call in self._calls}
        self._reject_second_names()
        try:
            self._meta = structure(module).requires_grad_(requires_grad=False)
        except Exception as reason:
            raise _unfit(module, f"it has no copy ({one_line(reason)})", COPIABLE) from reason
        for path, child in self._meta.named_modules():
            self._spare_recorders(child, path)
        self._put_stand_ins()
        self._metas = {mode: self._in_mode(self._meta, "", training=mode) for mode in (True, False)}
        """The module on the meta device in training, as it was watched, and in evaluation."""
        if any(child.training for child in module.modules()):
            self._metas[True] = self._meta
        self.is_example = True
        """Whether the example runs, in which no difference from the watch is due to shapes."""
        self._harmless = set[tuple[int, str]]()
        self._choices = dict[object, list[Any]]()
        """The constant arguments of calls by number, mode and shapes, and none behind the last."""
        read = {*chain(*self._used, *self._arguments)}
        self._shapes: list[list[Name]] = [
            [
                ("shape", number, leaf)
                for leaf, is_kept in enumerate(call.keeps_shape)
                if call.is_shapes and not is_kept and ("output", number, leaf) in read
            ]
            for number, call in enumerate(self._calls)
        ]
        """The shapes that each call passes on for its stand-ins, by name."""
        self._owned = self._owners(watch)
        self._items: list[tuple[str, int]] = []
        for number in range(len(self._calls) + 1):
            if watch.exists[number] or self._owned[number]:
                self._items.append(("segment", number))
            self._items.append(("call", number))
        del self._items[-1]
        self._segments = {number for kind, number in self._items if kind == "segment"}
        self._into = self._names_into(len(inputs))
        watch.forget()

    def __deepcopy__(self, memo: object) -> _Split:
        """The modules of a layer are copied for each stage, and share what runs them."""
        return self

    def layers(self) -> tuple[list[Layer], list[PartModule]]:
        layers, parts = list[Layer](), list[PartModule]()
        tied = {id(self._module.get_parameter(name)) for name, _ in tied_names(self._module)}
        for item, (kind, number) in enumerate(self._items):
            if kind == "call":
                name, key = self._calls[number].name, self._calls[number].key
                prefix, modules = name.removesuffix(key), {key: self._module.get_submodule(name)}
            else:
                name = f"behind.{self._calls[number - 1].name}" if number else "stem"
                name = "head" if number == len(self._calls) else name
                tree = self._tree(self._module, self._meta, self._owned[number], "")
                prefix, modules = "", {"": tree}
            run = partial(self._call if kind == "call" else self._segment, item)
            part = PartModule(modules, run, is_single=kind == "segment")
            [module] = modules.values()
            part.training = module.training
            part.can_compile = kind == "call"
            place: Kind = "embedding" if (kind, number) == ("segment", 0) else "block"
            parts.append(part)
            # A tied weight is trained by its other use.
            is_frozen = (kind == "call" and not self._calls[number].has_gradients) and not tied & {
                id(parameter) for parameter in part.parameters()
            }
            build = partial(structure, part, is_frozen=is_frozen)
            layers.append(Layer(name, build, kind=place, prefix=prefix))
        for last in [number for number, part in enumerate(parts) if [*part.parameters()]][-1:]:
            if layers[last].kind == "block":
                layers[last] = replace(layers[last], kind="head")
        return layers, parts

    def _reject_second_names(self) -> None:
        """ConfigError for a list, or a member of one, that the module has by another name as well:
        a copy of the module would have two of it."""
        paths = {*self._lists, *(f"{call.path}.{call.key}".lstrip(".") for call in self._calls)}
        known = {id(self._module.get_submodule(path)): path for path in sorted(paths)}
        for path, child in self._module.named_modules(remove_duplicate=False):
            own = known.get(id(child), path)
            is_other = path != own and path.rpartition(".")[0] not in self._lists
            if is_other and child.state_dict():
                there = re.sub(r"\.(\d+)", r"[\1]", f"self.{own}")
                raise ConfigError(
                    f"model: {type(self._module).__name__} has {own} by the name {path} as well; "
                    f"make that a property (@property) that returns {there}"
                )

    def _put_stand_ins(self) -> None:
        for path in self._lists:
            members = self._meta.get_submodule(path)
            stand_ins: dict[str, nn.Module | None] = {
                call.key: StandIn(member, partial(self._stand_in, number, member))
                for number, call in enumerate(self._calls)
                if call.path == path
                for member in [members.get_submodule(call.key)]
            }
            above, _, last = path.rpartition(".")
            if path:
                parent = self._meta.get_submodule(above)
                parent._modules[last] = with_modules(members, stand_ins)
            else:
                self._meta = with_modules(members, stand_ins)

    def _in_mode(self, module: nn.Module, path: str, *, training: bool) -> nn.Module:
        """A view of a module in which it and all around the lists have this mode."""
        around: dict[str, nn.Module | None] = {
            key: self._in_mode(child, f"{path}{key}.", training=training)
            for key, child in module._modules.items()
            if child is not None
            and any(f"{each}.".startswith(f"{path}{key}.") for each in self._lists)
        }
        view = with_modules(module, around)
        view.training = training
        return view

    def _owners(self, watch: Watch) -> list[set[str]]:
        """The names of the tensors that each segment has; the last one has what nothing reads."""
        outside: dict[int, list[str]] = {}
        for name, tensor in state_of(self._module):
            if not any(
                name.startswith(f"{path}.") if path else "." in name for path in self._lists
            ):
                outside.setdefault(id(tensor), []).append(name)
        owned: list[set[str]] = [set() for _ in watch.owned]
        there = [number for number, exists in enumerate(watch.exists) if exists]
        for key, names in outside.items():
            readers = [number for number, reads in enumerate(watch.owned) if key in reads]
            if not readers and not there:
                raise _unfit(self._module, f"its forward does not use {names[0]}")
            beside = [
                number
                for number in there
                for each, others in outside.items()
                if each in watch.owned[number]
                and others[0].rpartition(".")[0] == names[0].rpartition(".")[0]
            ]
            readers = readers or [(beside or there)[-1]]
            if len(readers) > len(names):
                raise _unfit(self._module, f"its forward uses {names[0]} in {len(readers)} places")
            readers += readers[-1:] * (len(names) - len(readers))
            for number, name in zip(readers, names, strict=True):
                owned[number].add(name)
        return owned

    def _names_into(self, inputs: int) -> list[list[Name]]:
        first: list[Name] = [("input", number, 0) for number in range(inputs)]
        sizes = [("size", number, 0) for number in range(inputs)]
        needs, makes = list[set[Name]](), list[list[Name]]()
        for kind, number in self._items:
            if kind == "segment":
                needs.append({*self._used[number], *(sizes if number else ())})
                needs[-1].update(*self._shapes[: max(number - 1, 0)])
                following = self._arguments[number] if number < len(self._arguments) else ()
                made = [n for n in following if n is not None and n[:2] == ("argument", number)]
            else:
                needs.append({name for name in self._arguments[number] if name is not None})
                call, is_last = self._calls[number], number == len(self._calls) - 1
                if call.has_numbers or call.has_choices or is_last:
                    needs[-1].update(sizes, *self._shapes[:number])
                made = [
                    ("output", number, leaf) for leaf in range(len(self._calls[number].outputs))
                ]
                made += self._shapes[number]
            makes.append([*dict.fromkeys(made)])
        into, known = [[*first]], [*first, *sizes]
        for item, made in enumerate(makes[:-1]):
            known += made
            later = set[Name]().union(*needs[item + 1 :])
            into.append([name for name in known if name in later])
        return into

    def _tree(self, module: nn.Module, meta: nn.Module, own: set[str], prefix: str) -> nn.Module:
        """A copy of a module with these tensors; all others are attributes on the meta device."""
        view = view_of(module)
        self._spare_recorders(view, prefix.rstrip("."))
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
            names = {f"{path}.{name}" for name, _ in state_of(child)}
            has_list = any(f"{each}.".startswith(f"{path}.") for each in self._lists)
            is_recording = any(f"{each}.".startswith(f"{path}.") for each, *_ in self._recorders)
            if path in self._lists and isinstance(module, nn.ModuleList):
                children[key] = other  # which runs over its members
            elif path in self._lists or (names and not names & own and not has_list):
                vars(view)[key] = other
            elif names <= own and not has_list and (names or not is_recording):
                children[key] = child
            else:
                children[key] = self._tree(child, other, own, f"{path}.")
        vars(view)["_modules"] = children
        return view

    def _spare_recorders(self, module: nn.Module, path: str) -> None:
        """Do not call the recorders of a copy of a module with tensors on the meta device."""
        for kind in FORWARD_HOOKS:
            hooks = OrderedDict(vars(module)[kind])
            mine = [key for key in hooks if (path, kind, key) in self._recorders]
            for key in mine:
                hooks[key] = partial(_with_contents, hooks[key])
            if mine:
                vars(module)[kind] = hooks

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
        trains = member.training or not call.trains
        leaves: Sequence[Any] = call.leaves
        if call.has_numbers:
            leaves, _ = self._ran(self._metas[trains], len(self._calls) + 1, number, values)
        elif call.has_choices:
            leaves = self._constants(number, values, trains=trains)
        given = [
            leaf if name is None else values[name]
            for leaf, name in zip(leaves, self._arguments[number], strict=True)
        ]
        args, kwargs = tree_unflatten(given, call.spec)
        with torch.set_grad_enabled(call.has_gradients and torch.is_grad_enabled()):
            output = member(*args, **kwargs)
        for leaf, one in enumerate(tree_leaves(output)[: len(call.keeps_shape)]):
            is_kept = call.keeps_shape[leaf]
            if is_kept and isinstance(one, Tensor) and one.shape != given[leaf].shape:
                values["shape", number, leaf] = _shape_of(one)
        if item == len(self._items) - 1:
            self._constants(len(self._calls), values, trains=trains)
            return output if isinstance(output, tuple) else (output,)
        self._reject_other_constants(number, output, values)
        for leaf, tensor in enumerate(tree_leaves(output)):
            values["output", number, leaf] = tensor
        for _, _, leaf in self._shapes[number]:
            values["shape", number, leaf] = _shape_of(values["output", number, leaf])
        return self._passed_on(item, values)

    def _constants(
        self, number: int, values: Mapping[Name, Tensor], *, trains: bool
    ) -> Sequence[Any]:
        """The arguments of a call that are no tensors, for these shapes, in their places; behind
        the last call there are none, and ConfigError if the forward does more there than at the
        watch."""
        key = number, trains, *_shapes_of(values)
        if key not in self._choices:
            leaves: Sequence[Any] = () if number == len(self._calls) else self._calls[number].leaves
            try:
                result, is_end = self._ran(
                    self._metas[trains], len(self._calls) + 1, number, values
                )
                leaves = leaves if is_end else result
            except Exception as reason:  # It may read contents, which no layer up to here needs.
                if isinstance(reason, ConfigError):
                    raise
            self._choices[key] = [None if isinstance(one, Tensor) else one for one in leaves]
        return self._choices[key]

    def _values(self, item: int, tensors: Sequence[Tensor]) -> dict[Name, Tensor]:
        names = self._into[item]
        values = dict(zip(names, tensors, strict=False))
        for tensor in tensors[len(names) :]:
            number, leaf, *shape = tensor.shape[1:]
            values["shape", number, leaf] = tensor.new_empty((0, *shape))
        if item == 0:
            for number, tensor in enumerate(tensors):
                values["size", number, 0] = _shape_of(tensor)
        return values

    def _passed_on(self, item: int, values: Mapping[Name, Tensor]) -> tuple[Tensor, ...]:
        """The tensors for the next layer, and the shapes of results that had the shapes of the
        arguments at the watch, and have not now; before such a shape are call and place."""
        names = self._into[item + 1]
        more = [
            tensor.new_empty((0, number, leaf, *tensor.shape[1:]))
            for (kind, number, leaf), tensor in values.items()
            if kind == "shape" and self._calls[number].keeps_shape[leaf]
        ]
        passed = (values[name] for name in names)
        return *(each.clone() if each.is_inference() else each for each in passed), *more

    def _ran(
        self, tree: nn.Module, first: int, stop: int, values: Mapping[Name, Tensor]
    ) -> tuple[Any, bool]:
        """Run the forward from segment `first` on: what call `stop` gets, or result and True."""
        inputs = [values.get(("input", number, 0)) for number in range(len(self._dtypes))]
        with torch.set_grad_enabled(torch.is_grad_enabled()), ExitStack() as before:
            seen: dict[Name, Tensor] = {}
            if first:
                before.enter_context(_disable_current_modes())  # which count flops of this layer
                before.enter_context(_Mixed())
                inputs = [
                    torch.empty(values["size", number, 0].shape[1:], dtype=dtype, device="meta")
                    for number, dtype in enumerate(self._dtypes)
                ]
                seen = {("input", n, 0): each for n, each in enumerate(inputs) if each is not None}
            run = _Run(first, stop, values, seen, before)
            run.note(inputs)
            token = _RUN.set(run)
            try:
                result, is_end = run_until_reached(tree, *inputs)
            finally:
                _RUN.reset(token)
            if is_end and first > len(self._calls):  # all of it on the meta device
                self._reject_other_end(run, result)
            return result, is_end

    def _stand_in(self, number: int, member: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of a stand-in in the place of call `number`."""
        run, call = _RUN.get(), self._calls[number]
        self._reject_other_order(run, number)
        run.called = number + 1
        leaves, spec = tree_flatten(as_constants((args, kwargs)))
        self._reject_other_arguments(run, number, leaves, spec)
        if number == run.stop:
            raise Reached(leaves)
        for leaf, name in enumerate(self._arguments[number]):
            if name is not None:
                run.seen.setdefault(name, leaves[leaf])
        results = [*call.outputs] if call.is_shapes else tree_leaves(member(*args, **kwargs))
        if number == run.first - 1:
            for name in self._used[run.first]:
                if name in run.seen:
                    value = run.values[name]
                    with (
                        torch.inference_mode(mode=False),
                        torch.set_grad_enabled(run.has_gradients),
                    ):
                        value = value.view_as(value)
                    torch._C._swap_tensor_impl(run.seen[name], value)
            run.before.close()
            results = [
                run.values.get(("output", number, leaf), result)
                for leaf, result in enumerate(results)
            ]
        elif call.is_shapes:
            for leaf, is_kept in enumerate(call.keeps_shape):
                shape = run.values.get(("shape", number, leaf))
                if shape is not None:
                    like = torch.empty(shape.shape[1:], dtype=shape.dtype, device="meta")
                    results[leaf] = like
                elif is_kept:
                    results[leaf] = torch.empty_like(leaves[leaf], device="meta")
        run.note([*leaves, *results])
        run.outputs = results
        return tree_unflatten(results, call.output_spec)

    # -- what other shapes change -------------------------------------------------------------

    def _reject_other_order(self, run: _Run, number: int) -> None:
        """ConfigError where a call, or the end, does not come next."""
        if number != run.called:
            self._reject(number, "calls other blocks, or in another order,", run.values)

    def _reject_other_arguments(
        self, run: _Run, number: int, leaves: Sequence[Any], spec: object
    ) -> None:
        """ConfigError where a call gets other things than at the watch, or in another way."""
        call, names = self._calls[number], self._arguments[number]
        are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        if spec != call.spec or are_tensors != [name is not None for name in names]:
            self._reject(number, f"gives {call.name} other arguments", run.values)
            return
        for leaf, name in zip(leaves, names, strict=True):
            if name is None or name[:2] == ("argument", number):
                continue
            is_written = number not in self._segments and run.has(leaf) and run.has_written_to(leaf)
            if is_written or not run.has(leaf):
                self._reject(number, f"computes more before {call.name}", run.values)

    def _reject_other_constants(
        self, number: int, output: object, values: Mapping[Name, Tensor]
    ) -> None:
        """ConfigError where a call returns others than tensors that it did not return at the watch,
        since later layers take those."""
        call, (leaves, spec) = self._calls[number], tree_flatten(output)
        are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        is_same = (spec, are_tensors) == (call.output_spec, call.is_tensor)
        if call.is_shapes and not (is_same and constants == call.outputs):
            self._reject(number, f"gets another kind of result from {call.name}", values)

    def _reject_other_end(self, run: _Run, result: object) -> None:
        self._reject_other_order(run, len(self._calls))
        [*results], last = tensors_of(result), self._calls[-1].name
        is_last = len(results) == 1 and any(results[0] is each for each in run.outputs)
        if not is_last or run.has_written_to(results[0]):
            self._reject(len(self._calls), f"computes more behind {last}", run.values)

    def _reject(self, number: int, what: str, values: Mapping[Name, Tensor]) -> None:
        """ConfigError for what the forward does at shapes that the watch did not have."""
        if self.is_example:
            self._harmless.add((number, what))
        if (number, what) in self._harmless:
            return
        sizes = [tuple(each.shape[1:]) for name, each in values.items() if name[0] == "size"]
        inputs = " and ".join(map(str, sizes)) or "other shapes"
        raise _unfit(
            self._module,
            f"its forward {what} for inputs of {inputs} than for the two samples by which it was "
            "cut",
        )


class _Mixed(TorchFunctionMode):
    """Results of tensors on the meta device and of others, which the forward makes without a
    `device`, are on the meta device; one of the others that is written to moves there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tensors_of((args, kwargs))
        if func is Tensor.__setitem__ and any(each.is_meta for each in given):
            self._move(args[0])
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError:
            if {each.is_meta for each in given} != {True, False}:
                raise
            args, kwargs = tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))
            result = func(*args, **(kwargs or {}))
            results, moved = tensors_of(result), tensors_of((args, kwargs))
            if not results or any(one is other for one in results for other in moved):
                raise  # It writes to one that has not moved.
        for each in tensors_of(result):
            if not each.is_meta and all(each is not one for one in given):
                self._made[id(each)] = each
            if any(one.is_meta for one in given):
                self._move(each)
        return result

    def _move(self, tensor: Tensor) -> None:
        if id(tensor) in self._made:
            torch._C._swap_tensor_impl(tensor, torch.empty_like(tensor, device="meta"))


def _shape_of(tensor: Tensor) -> Tensor:
    """An empty tensor that tells a shape, behind a first dimension of 0."""
    return tensor.new_empty((0, *tensor.shape))


def _shapes_of(values: Mapping[Name, Tensor]) -> list[object]:
    """The shapes that tell what the forward does, and whether autograd records it."""
    shapes = [(*name, *each.shape) for name, each in values.items() if name[0] in ("size", "shape")]
    return [torch.is_grad_enabled(), *sorted(shapes)]


# Reason: both runs, and what differs between them, in order.
@torch.enable_grad()
def _reject_other_result(
    module: nn.Module,
    calls: Sequence[Call],
    layers: Mapping[Layer, nn.Module],
    inputs: Sequence[Tensor],
    kept: Sequence[nn.Module] = (),
) -> None:
    """ConfigError where the layers in a row give another result than the module, or another
    gradient of the smallest trained parameter of a layer: in evaluation, or in training if there
    are modules `kept`, whose attributes and buffers stay as they are. A training that draws random
    numbers is not compared."""

    @contextmanager
    def run(seed: int) -> Iterator[None]:
        found = [slot for each in kept for slot in slots(each)]
        copies = {id(slot.tensor): slot.tensor.clone() for slot in found}
        buffers = [(slot, copies[id(slot.tensor)]) for slot in found]
        with same_attributes(kept), replaced(buffers):
            seed_all(seed, "own forward")
            yield

    smallest: dict[str, Tensor] = {}
    for layer, part in layers.items():
        trained = {name: each for name, each in part.named_parameters() if each.requires_grad}
        if trained:
            name = min(trained, key=lambda name: trained[name].numel())
            smallest[layer.full_name(name)] = trained[name]
    for child in chain.from_iterable(each.modules() for each in (module, *layers.values())):
        child.training = bool(kept) and not _draws_or_normalizes(child)
    way = NO_AUTOCAST if any(call.is_autocast for call in calls) else BY_HAND
    values: Any = _copies(inputs)
    try:
        with run(0):
            for part in layers.values():
                values = part(*values)
                values = values if isinstance(values, tuple) else (values,)
    except Exception as reason:
        raise _unfit(module, _why_apart(reason), way) from reason
    gradients = _gradients(tensors_of(values), smallest)
    ours = [each.detach() for each in tensors_of(values)]
    del values  # and the activations behind it
    recorded: list[bool] = []
    hooks = [
        module.get_submodule(call.name).register_forward_pre_hook(
            lambda *_: recorded.append(is_recorded())
        )
        for call in calls
    ]
    try:
        with run(0):
            theirs = as_tuple(type(module).__name__, module(*_copies(inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    if kept:
        with run(1):
            again = as_tuple(type(module).__name__, module(*_copies(inputs)))
        if not all(map(torch.equal, theirs, again)):
            return
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or not torch.allclose(one, other, equal_nan=True, **CLOSE):
            raise _unfit(module, "its layers one after the other give another result", way)
    if recorded != [call.has_gradients for call in calls]:
        return  # The forward calls torch.no_grad() in one mode only.
    plain = _gradients(theirs, smallest)
    largest = max((float(each.abs().max()) for each in plain.values()), default=0.0)
    for name, gradient in plain.items():
        within = SAME_GRADIENT * float(gradient.abs().max()) + NOISE * largest
        if name not in gradients or not torch.allclose(
            gradients[name], gradient, rtol=0.0, atol=within
        ):
            hooked = [path for path, found in _lists(module).items() if found._backward_hooks]
            more = f", without the backward hooks of {hooked[0]}" if hooked else ""
            why = f"its layers one after the other give {name} another gradient{more}"
            raise _unfit(module, why, way)


def _draws_or_normalizes(child: nn.Module) -> bool:
    """Whether a module is torch's dropout or normalizes by its samples in training, or is the part
    that runs one: as in evaluation, it then has one result in each run."""
    parts = vars(child).get("_parts", {"": child})
    own = (each for name, each in parts.items() if child._modules.get(name) is not each)
    return any(isinstance(each, (_DropoutNd, _NormBase)) for each in own)


def _why_apart(reason: Exception) -> str:
    """Why the layers cannot run one after the other, by what the first that fails raises."""
    what = one_line(reason)
    if any(words in what for words in ("out of meta", "expected device", "the same device")):
        return (
            "its forward makes a tensor around its blocks on another device than its inputs have "
            f"({what}; write device=x.device)"
        )
    if isinstance(reason, NotImplementedError):
        what = what.partition(". ")[0]
        return f"its forward does around its blocks what the meta device cannot run ({what})"
    if "on meta tensors" in what:
        return (
            "its forward reads contents of a tensor around its blocks, where other layers have the "
            f"shape alone ({what}; transformers reads those of a 2-D attention mask, and not those "
            "of mask[:, None, None, :].bool())"
        )
    return f"its forward depends on more than what its blocks are given ({what})"


def _gradients(results: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of parameters for a weighted sum of results, as a plain sum of a softmax is
    constant; empty if torch.autograd.grad fails, as it does for some checkpoints."""
    total = torch.zeros(())
    try:
        for each in results:
            if each.is_floating_point() and each.dim():
                weights = torch.arange(each.shape[-1], device=each.device).cos()
                total = total + (each @ weights.to(each.dtype)).sum()
        found = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
    except Exception:
        return {}
    return {
        name: torch.zeros(()) if one is None else one.to_dense().float().nan_to_num()
        for name, one in zip(parameters, found, strict=True)
    }


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Inputs for one forward, which may write to them."""
    return [each.clone() for each in inputs]


def by_folder(module: nn.Module) -> str:
    """The way to train a model of transformers from its folder, which knows no frozen ones; empty
    for another model, and for one with modules of other origin in it, which no folder has."""
    of_libraries = {type(each).__module__.partition(".")[0] for each in module.modules()}
    if not hasattr(module, "save_pretrained") or not of_libraries <= {"torch", "transformers"}:
        return ""
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    also = f', with learning_rates=["{frozen[0]}=0", …] for what is frozen' if frozen else ""
    return f"save it by save_pretrained(FOLDER), and give ax.hf(FOLDER) without loss={also}"


def _unfit(module: nn.Module, why: str, way: str = BY_HAND) -> ConfigError:
    if any(
        isinstance(each, torch.ScriptObject) for m in module.modules() for each in vars(m).values()
    ):
        way = "give it as it was before it was quantized (torch.ao), or " + way
    if isinstance(module, nn.ModuleList):
        way = "give nn.Sequential(*modules) if each gets the result of the one before it"
    if folder := by_folder(module):
        way = f"if it predicts next tokens, {folder}; else {way}"
    return ConfigError(f"model: {type(module).__name__} cannot be cut into layers: {why}; {way}")
