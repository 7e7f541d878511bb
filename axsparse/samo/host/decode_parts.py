"""Numbers at addresses, read and written by the loops of `decode_loops.py` and
`bf16_decode_loops.py`. Only the process that compiles loops imports this file.

Arrays are given by their addresses, since for the smallest layers describing an array takes longer
than the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from axsparse.samo.host.loop_parts import FLOAT, INT16, INT32, INT64, compiled, intrinsic


def address_of(builder: Any, address: Any, entry: Any, nbytes: int, kind: Any) -> Any:
    """Where a vector or a number begins: at an entry, of `nbytes` each, of an array."""
    begin = builder.add(address, builder.mul(entry, INT64(nbytes)))
    return builder.inttoptr(begin, kind.as_pointer())


def _fp32(builder: Any, bits: Any) -> Any:
    """A bf16 number, by its bits, as fp32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INT32), INT32(16)), FLOAT)


def _reader(kind: Any, nbytes: int, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """A function for loops that reads an entry of an array at an address."""

    def read(_: Any, address: Any, entry: Any) -> Any:
        def call(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            where = address_of(builder, arguments[0], arguments[1], nbytes, kind)
            return convert(builder, builder.load(where, align=nbytes))

        return result(address, entry), call

    return intrinsic(read)


int32_at = _reader(INT32, 4, types.int64, lambda builder, number: builder.sext(number, INT64))
int64_at = _reader(INT64, 8, types.int64, lambda _, number: number)
fp32_at = _reader(FLOAT, 4, types.float32, lambda _, number: number)
bf16_at = _reader(INT16, 2, types.float32, _fp32)


@intrinsic
def put_fp32(_: Any, address: Any, entry: Any, number: Any) -> Any:
    """Write a number to an array of fp32."""

    def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, entry, number = arguments
        builder.store(number, address_of(builder, address, entry, 4, FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(address, entry, number), call


@intrinsic
def put_bf16(_: Any, address: Any, entry: Any, number: Any) -> Any:
    """Write a number to an array of bf16, rounded to the nearest, to the even one of two."""

    def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, entry, number = arguments
        bits = builder.bitcast(number, INT32)
        upper = builder.lshr(bits, INT32(16))
        half = builder.add(builder.and_(upper, INT32(1)), INT32(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), INT32(16))
        is_nan = builder.fcmp_unordered("uno", number, number)
        bits = builder.select(is_nan, builder.or_(upper, INT32(0x40)), rounded)
        where = address_of(builder, address, entry, 2, INT16)
        builder.store(builder.trunc(bits, INT16), where, align=2)
        return context.get_dummy_value()

    return types.void(address, entry, number), call


@intrinsic
def put_upper(_: Any, address: Any, entry: Any, number: Any) -> Any:
    """Write a number to an array of bf16, rounded towards zero."""

    def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, entry, number = arguments
        upper = builder.lshr(builder.bitcast(number, INT32), INT32(16))
        is_nan = builder.fcmp_unordered("uno", number, number)
        upper = builder.select(is_nan, builder.or_(upper, INT32(0x40)), upper)
        where = address_of(builder, address, entry, 2, INT16)
        builder.store(builder.trunc(upper, INT16), where, align=2)
        return context.get_dummy_value()

    return types.void(address, entry, number), call


# Reason: a number, and all that an output depends on.
@compiled
def put_output(total: float, bias: int, row: int, out: int, is_bf16: int, entry: int) -> None:
    """Write one output after adding the row's bias; `bias` is 0 or the biases' address."""
    if is_bf16:
        if bias:
            total += bf16_at(bias, row)
        put_bf16(out, entry, total)
    else:
        if bias:
            total += fp32_at(bias, row)
        put_fp32(out, entry, total)
