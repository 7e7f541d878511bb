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


def _rounded(builder: Any, number: Any) -> Any:
    """A number as the bits of the nearest one of bf16, the even one of two."""
    bits = builder.bitcast(number, INT32)
    odd = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
    return _upper(builder, number, builder.add(bits, builder.add(odd, INT32(0x7FFF))))


def _truncated(builder: Any, number: Any) -> Any:
    """A number as the bits of the next one of bf16 towards zero."""
    return _upper(builder, number, builder.bitcast(number, INT32))


def _upper(builder: Any, number: Any, bits: Any) -> Any:
    """The upper half of some bits, or a NaN of bf16 where the number is a NaN."""
    own = builder.or_(builder.bitcast(number, INT32), INT32(0x400000))
    is_nan = builder.fcmp_unordered("uno", number, number)
    upper = builder.lshr(builder.select(is_nan, own, bits), INT32(16))
    return builder.trunc(upper, INT16)


def _writer(kind: Any, nbytes: int, convert: Callable[[Any, Any], Any]) -> Any:
    """A function for loops that writes a number as an entry of an array at an address."""

    def write(_: Any, address: Any, entry: Any, number: Any) -> Any:
        def call(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            where = address_of(builder, arguments[0], arguments[1], nbytes, kind)
            builder.store(convert(builder, arguments[2]), where, align=nbytes)
            return context.get_dummy_value()

        return types.void(address, entry, number), call

    return intrinsic(write)


put_fp32 = _writer(FLOAT, 4, lambda _, number: number)
put_bf16 = _writer(INT16, 2, _rounded)
put_upper = _writer(INT16, 2, _truncated)


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
