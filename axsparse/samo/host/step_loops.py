"""The loops of `host_step.py`, which only the process that compiles them imports, for it has numba.

bf16 numbers are arrays of their bits, since numpy has no such type. An argument that a tensor does
not have is None, for which numba compiles a loop of its own. A function that raises
NotImplementedError is a name only: numba takes the implementation that `extending.overload` gives
for the types of its arguments, and nothing calls it from Python. Every operation rounds as torch's
does on a CPU: numba neither joins nor reorders operations by itself, and `multiply_add` stands
where torch's kernels have it. All loops compile to vector instructions; with more than five arrays
they would not, since the compiler then gives up comparing where they begin and end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types

from axsparse.samo.host.compiled_loops import BARE, Array

SIXTEEN, HALF_UNIT = np.uint32(16), np.uint32(0x8000)
QUIET_NAN = np.uint16(0x7FC0)
STRETCH = 512
"""Entries that several loops go over in turn: their arrays fit the cache that is nearest."""


# -- what the loops are made of -------------------------------------------------------------


def _multiply_add(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c with one rounding."""
    return types.float32(a, b, c), lambda _, builder, __, arguments: builder.fma(*arguments)


def _from_bits(_: Any, bits: Any) -> Any:
    """The fp32 number of 32 bits."""
    number = ir.FloatType()
    cast = types.float32(types.uint32)
    return cast, lambda _, builder, __, arguments: builder.bitcast(arguments[0], number)


def _to_bits(_: Any, value: Any) -> Any:
    """The 32 bits of an fp32 number."""
    number = ir.IntType(32)
    cast = types.uint32(types.float32)
    return cast, lambda _, builder, __, arguments: builder.bitcast(arguments[0], number)


_extending: Any = extending  # whose types know no function that only machine code can call
multiply_add, from_bits, to_bits = map(_extending.intrinsic, (_multiply_add, _from_bits, _to_bits))


def widened(value: Any) -> Any:
    """A number that is fp32, or bf16 as its bits, as fp32."""
    raise NotImplementedError


def _widened(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: from_bits(np.uint32(np.uint32(value) << SIXTEEN))
    return lambda value: value


def master_of(master: Any, weight: Any, low: Any, at: Any) -> Any:
    """The fp32 master of one entry: stored, or joined (`samo/precision.py`)."""
    raise NotImplementedError


def _master_of(master: Any, weight: Any, low: Any, at: Any) -> Any:
    if low is types.none:
        return lambda master, weight, low, at: master[at]
    return lambda master, weight, low, at: from_bits(
        np.uint32(np.uint32(np.uint32(weight[at]) << SIXTEEN) + np.uint32(np.int32(low[at])))
    )


def store_master(master: Any, low: Any, at: Any, value: Any) -> Any:
    """Store an fp32 master, or its remainder, which is zero for a NaN."""
    raise NotImplementedError


def _store_master(master: Any, low: Any, at: Any, value: Any) -> Any:
    def whole(master: Any, low: Any, at: Any, value: Any) -> None:
        master[at] = value

    def split(master: Any, low: Any, at: Any, value: Any) -> None:
        low[at] = np.int16(to_bits(value) & np.uint32(0xFFFF)) if value == value else np.int16(0)

    return whole if low is types.none else split


def part(array: Any, begin: Any, end: Any) -> Any:
    """The entries [begin, end) of an array, or None of None."""
    raise NotImplementedError


def _part(array: Any, begin: Any, end: Any) -> Any:
    if array is types.none:
        return lambda array, begin, end: None
    return lambda array, begin, end: array[begin:end]


def store_weight(weight: Any, at: Any, value: Any) -> Any:
    """Store a master rounded to bf16 (`samo/precision.py`), if the caller wants it."""
    raise NotImplementedError


def _store_weight(weight: Any, at: Any, value: Any) -> Any:
    def rounded(weight: Any, at: Any, value: Any) -> None:
        high = np.uint32(to_bits(value) + HALF_UNIT) >> SIXTEEN
        weight[at] = np.uint16(high) if value == value else QUIET_NAN

    def nothing(weight: Any, at: Any, value: Any) -> None:
        pass

    return nothing if weight is types.none else rounded


_extending.overload(widened, strict=False)(_widened)
_extending.overload(master_of, strict=False)(_master_of)
_extending.overload(store_master, strict=False)(_store_master)
_extending.overload(part, strict=False)(_part)
_extending.overload(store_weight, strict=False)(_store_weight)


# -- the loops ------------------------------------------------------------------------------


def _adamw_moments(
    gradient: Array, factor: Any, mean: Array, square: Array, factors: tuple[Any, ...]
) -> None:
    mean_weight, square_decay, square_weight = factors[0], factors[1], factors[2]
    # As torch.lerp: from the end that is nearer.
    near_mean, other_weight = mean_weight < np.float32(0.5), mean_weight - np.float32(1)
    for i in range(mean.size):
        value = widened(gradient[i]) * factor
        apart = value - mean[i]
        if near_mean:
            mean[i] = multiply_add(mean_weight, apart, mean[i])
        else:
            mean[i] = multiply_add(other_weight, apart, value)
        square[i] = multiply_add(square_weight * value, value, square[i] * square_decay)


# Reason: the arrays of one entry, each of which numba must see by itself.
def _adamw_apply(
    master: Array | None,
    weight: Array | None,
    low: Array | None,
    mean: Array,
    square: Array,
    factors: tuple[Any, ...],
) -> None:
    decay, correction, eps, rate = factors[3], factors[4], factors[5], factors[6]
    for i in range(mean.size):
        denominator = np.sqrt(square[i]) / correction + eps
        value = master_of(master, weight, low, i) * decay + rate * mean[i] / denominator
        store_master(master, low, i, value)
        store_weight(weight, i, value)


# Reason: the arrays of one entry, each of which numba must see by itself.
def _adamw_step(
    gradient: Array,
    factor: Any,
    moments: tuple[Array, Array],
    master: Array | None,
    weight: Array | None,
    low: Array | None,
    factors: tuple[Any, ...],
) -> None:
    mean, square = moments
    for begin in range(0, mean.size, STRETCH):
        end = min(begin + STRETCH, mean.size)
        near, far = mean[begin:end], square[begin:end]
        adamw_moments(gradient[begin:end], factor, near, far, factors)
        own = (part(master, begin, end), part(weight, begin, end), part(low, begin, end))
        adamw_apply(own[0], own[1], own[2], near, far, factors)


# Reason: the arrays of one entry, each of which numba must see by itself.
def _sgd_step(
    gradient: Array,
    factor: Any,
    momentum: Array | None,
    master: Array | None,
    weight: Array | None,
    low: Array | None,
    factors: tuple[Any, ...],
) -> None:
    weight_decay, damping, rate, nesterov = factors[0], factors[1], factors[2], factors[3]
    for i in range(gradient.size):
        direction = widened(gradient[i]) * factor
        value = master_of(master, weight, low, i)
        if weight_decay != 0:
            direction = multiply_add(weight_decay, value, direction)
        direction = with_momentum(momentum, i, direction, damping, nesterov)
        value = multiply_add(rate, direction, value)
        store_master(master, low, i, value)
        store_weight(weight, i, value)


def _sum_of_squares(values: Array, sums: Array) -> None:
    total = 0.0
    for i in range(values.size):
        value = np.float64(widened(values[i]))  # whose square is exact
        total += value * value
    sums[0] = total


def with_momentum(momentum: Any, at: Any, direction: Any, damping: Any, nesterov: Any) -> Any:
    """The direction of SGD's step, after the entry's momentum is updated."""
    raise NotImplementedError


def _with_momentum(momentum: Any, at: Any, direction: Any, damping: Any, nesterov: Any) -> Any:
    def moved(momentum: Any, at: Any, direction: Any, damping: Any, nesterov: Any) -> Any:
        momentum[at] = momentum[at] * damping + direction
        if nesterov != 0:
            return multiply_add(damping, momentum[at], direction)
        return momentum[at]

    def plain(momentum: Any, at: Any, direction: Any, damping: Any, nesterov: Any) -> Any:
        return direction

    return plain if momentum is types.none else moved


_extending.overload(with_momentum, strict=False)(_with_momentum)

# Without numpy's error model every division would be tested for zero, one at a time.
_compile = njit(nogil=True, error_model="numpy", **BARE)
adamw_moments = _compile(_adamw_moments)
adamw_apply = _compile(_adamw_apply)
adamw_step = _compile(_adamw_step)
sgd_step = _compile(_sgd_step)
# Of this sum only the rounding to fp32 counts, so it is added in the order of vector instructions.
sum_of_squares = njit(nogil=True, fastmath={"reassoc"}, **BARE)(_sum_of_squares)
