"""What `prefetch` of `numba_loops.py` compiles to; only that file imports this one, late, since it
loads numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.np import arrayobj

from axsparse.samo.index.numba_loops import prefetch

READ, ALL_CACHES, DATA = 0, 3, 1
_arrays: Any = arrayobj  # which is not typed


def _fetch(_: Any, array: Any, at: Any) -> Any:
    """The processor's own instruction, which ignores addresses that are not there."""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries = _arrays.make_array(signature.args[0])(context, builder, arguments[0]).data
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address], kind)
        place = builder.bitcast(builder.gep(entries, [arguments[1]]), address)
        builder.call(function, [place, *map(number, (READ, ALL_CACHES, DATA))])
        return context.get_dummy_value()

    return types.void(array, at), call


_extending: Any = extending  # whose types know no function that only machine code can call
_fetch_now = _extending.intrinsic(_fetch)


def _prefetch(array: Any, at: Any) -> Any:  # noqa: ARG001 - numba passes their types
    return lambda array, at: _fetch_now(array, at)


_extending.overload(prefetch, strict=False)(_prefetch)
