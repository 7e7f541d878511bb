"""Finds the objects that a function of the program can read, such as modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

from axsparse.models.sequential import PLAIN, hooks_of

MOST_REACHED = 10_000
"""Objects that `reached` looks at, at most."""


def reaches(function: object, modules: Iterable[nn.Module]) -> bool:
    """Whether a function can read one of these modules, by what it holds and globals it names."""
    return bool(reached(function).keys() & {id(module) for module in modules})


def shares_with_hooks(function: object, module: nn.Module) -> bool:
    """Whether a function and a hook of a module can read the same dictionary, list or object of the
    program, such as one in which a hook keeps the result of a layer."""
    no_store = (nn.Module, FunctionType, BuiltinFunctionType, MethodType, partial, tuple)
    kept = {
        one
        for hook in hooks_of(module)
        for one, found in reached(hook).items()
        if not isinstance(found, no_store)
    }
    return bool(kept) and bool(kept & reached(function).keys())


def reached(function: object) -> dict[int, object]:
    """The objects that a function can read, by their `id`, up to modules."""
    left, seen = [function], dict[int, object]()
    while left and len(seen) < MOST_REACHED:
        one = left.pop()
        is_plain = one is None or isinstance(one, (type, ModuleType, Tensor, *PLAIN))
        if id(one) in seen or is_plain:
            continue
        seen[id(one)] = one
        if isinstance(one, FunctionType):
            left += _read_by(one)
        elif isinstance(one, MethodType):
            left += [one.__func__, one.__self__]
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        else:
            left += getattr(one, "__dict__", {}).values()
            left += [getattr(type(one), name, None) for name in ("__call__", "forward")]
    return seen


def _read_by(function: FunctionType) -> Iterator[object]:
    """The objects that a function holds, and the globals that its code names."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield from (function.__globals__.get(name) for name in code.co_names)
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that has no contents yet
            yield cell.cell_contents
