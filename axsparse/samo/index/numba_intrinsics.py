"""What `take_word` and `put_word` of `mask_loops.py` compile to.

Only the process that compiles loops imports this file, since it loads numba.

A word of 64 bits says which of 64 entries are kept. AVX-512 has instructions that move the kept
entries of a vector side by side, and back (`vpcompress`, `vpexpand`); a vector has 32 entries of 2
bytes or 16 of 4. Vectors are read and written whole, so that all of their entries have to exist.
(The same instructions can read or write the kept entries only, but AMD's processors then take many
times as long.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import config, extending, types
from numba.core import cgutils, codegen
from numba.np import arrayobj

from axsparse.samo.index.mask_loops import put_word, take_word

READ, ALL_CACHES, DATA = 0, 3, 1
AHEAD = 2048
"""Entries by which the memory that is read next is fetched early. After a backward, whose gradients
are not in the cache, a gather takes a third less time with it; that far ahead, in bf16, is another
page, whose address takes longest to find."""
VECTOR_BYTES = 64
FEATURES = {2: "+avx512vbmi2", 4: "+avx512f"}
"""What processors call the instructions for entries of so many bytes."""

BIT, INT32, INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
# None of these is typed.
_arrays: Any = arrayobj
_cgutils: Any = cgutils
_codegen: Any = codegen
_config: Any = config
_extending: Any = extending


# Reason: the arguments of the function that it stands for.
def _take(_: Any, dense: Any, at: Any, bits: Any, values: Any, number: Any) -> Any:
    """The kept entries of `dense` from `at` on, to `values` from `number` on."""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        dense, position, word, values, first = arguments
        vector, lanes, function = _instruction(builder, signature.args[0], "compress")
        number = first
        for group in range(64 // lanes):
            kept, count = _part(builder, word, group, lanes)
            begin = builder.add(position, INT64(group * lanes))
            pointer = vector.as_pointer()
            _fetch(context, builder, signature.args[0], dense, builder.add(begin, INT64(AHEAD)))
            source = _place(context, builder, signature.args[0], dense, begin, pointer)
            target = _place(context, builder, signature.args[3], values, number, pointer)
            loaded = builder.load(source, align=1)
            builder.store(builder.call(function, [loaded, loaded, kept]), target, align=1)
            number = builder.add(number, count)
        return builder.sub(number, first)

    return types.int64(dense, types.int64, types.uint64, values, types.int64), call


# Reason: the arguments of the function that it stands for.
def _put(_: Any, dense: Any, at: Any, bits: Any, values: Any, number: Any) -> Any:
    """`values` from `number` on, to the kept entries of `dense` from `at` on."""

    def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        dense, position, word, values, first = arguments
        vector, lanes, function = _instruction(builder, signature.args[0], "expand")
        number = first
        for group in range(64 // lanes):
            kept, count = _part(builder, word, group, lanes)
            begin = builder.add(position, INT64(group * lanes))
            pointer = vector.as_pointer()
            _fetch(context, builder, signature.args[0], dense, builder.add(begin, INT64(AHEAD)))
            source = _place(context, builder, signature.args[3], values, number, pointer)
            target = _place(context, builder, signature.args[0], dense, begin, pointer)
            pruned = builder.load(target, align=1)
            loaded = builder.load(source, align=1)
            builder.store(builder.call(function, [loaded, pruned, kept]), target, align=1)
            number = builder.add(number, count)
        return builder.sub(number, first)

    return types.int64(dense, types.int64, types.uint64, values, types.int64), call


def _fetch(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> None:
    address = ir.IntType(8).as_pointer()
    called = ir.FunctionType(ir.VoidType(), [address, INT32, INT32, INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [address], called)
    place = _place(context, builder, kind, array, at, address)
    builder.call(function, [place, *map(INT32, (READ, ALL_CACHES, DATA))])


def _place(
    context: Any, builder: Any, kind: Any, array: Any, at: Any, pointer: ir.PointerType
) -> Any:
    """The address of an entry of an array."""
    entries = _arrays.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(entries, [at]), pointer)


def _instruction(builder: Any, array: Any, name: str) -> tuple[ir.VectorType, int, Any]:
    """The type of a vector, its number of entries, and the instruction: of a vector, of what the
    entries that it leaves have, and of the bits of those that are kept."""
    lanes = VECTOR_BYTES // array.dtype.bitwidth * 8
    vector = ir.VectorType(ir.IntType(array.dtype.bitwidth), lanes)
    kind = ir.FunctionType(vector, [vector, vector, ir.VectorType(BIT, lanes)])
    full_name = f"llvm.x86.avx512.mask.{name}.v{lanes}i{array.dtype.bitwidth}"
    return vector, lanes, _cgutils.get_or_insert_function(builder.module, kind, full_name)


def _part(builder: Any, word: Any, group: int, lanes: int) -> tuple[Any, Any]:
    """Which entries of a group of a word are kept, and their number."""
    bits = builder.trunc(builder.lshr(word, INT64(group * lanes)), ir.IntType(lanes))
    return builder.bitcast(bits, ir.VectorType(BIT, lanes)), builder.zext(
        builder.ctpop(bits), INT64
    )


def _has_instructions(dense: Any, values: Any) -> bool:
    """Whether numba compiles for a processor that has the instructions for these arrays."""
    features = _config.CPU_FEATURES
    known = _codegen.get_host_cpu_features() if features is None else features
    wanted = FEATURES.get(dense.dtype.bitwidth // 8)
    are_flat = dense.layout == values.layout == "C" and dense.dtype == values.dtype
    return are_flat and wanted in known.split(",")


_take_now, _put_now = map(_extending.intrinsic, (_take, _put))


def _moved(move: Callable[..., Any]) -> Any:
    """What to compile in place of `take_word` or `put_word`, for some types."""

    def moved(dense: Any, at: Any, bits: Any, values: Any, number: Any) -> Any:
        if _has_instructions(dense, values):
            return lambda dense, at, bits, values, number: move(dense, at, bits, values, number)
        return lambda dense, at, bits, values, number: -1

    return moved


_extending.overload(take_word, strict=False)(_moved(_take_now))
_extending.overload(put_word, strict=False)(_moved(_put_now))
