"""The loops of `host_step.py`, which only the process that compiles them imports.

An argument that a tensor does not have is None, for which numba compiles a separate loop. Every
operation rounds as torch's does on a CPU: numba neither joins nor reorders operations by itself,
and `multiply_add` stands where torch's kernels have it. All loops compile to vector instructions;
with more than five arrays they would not, since the compiler then gives up comparing where they
begin and end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from axsparse.samo.host.compiled_loops import Array
from axsparse.samo.host.loop_parts import FLOAT, INT32, INT64, compiled, intrinsic

SIXTEEN, HALF_UNIT = np.uint32(16), np.uint32(0x8000)
QUIET_NAN = np.uint16(0x7FC0)
ABSOLUTE = np.uint32(0x7FFFFFFF)
ROUNDING = np.float64(1.5 * 2**52)
ROUNDING_BITS = np.int64(np.array(1.5 * 2**52).view(np.int64))
PART_BITS = np.int64(26)
UP, DOWN = np.float64(2**26), np.float64(2**-26)
STRETCH = 512
"""Entries that several loops go over in turn: their arrays fit the cache that is nearest."""


@intrinsic
def multiply_add(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c with one rounding, in fp32 or fp64."""
    return a(a, b, c), lambda _, builder, __, arguments: builder.fma(*arguments)


@intrinsic
def to_bits(_: Any, value: Any) -> Any:
    """The bits of a number: of fp32 unsigned, of fp64 signed."""
    kind, bits = (types.uint32, INT32) if value == types.float32 else (types.int64, INT64)
    return kind(value), lambda _, builder, __, arguments: builder.bitcast(arguments[0], bits)


@intrinsic
def widened(_: Any, value: Any) -> Any:
    """A number that is fp32, or bf16 as its bits, as fp32."""

    def call(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        if value != types.uint16:
            return arguments[0]
        bits = builder.zext(arguments[0], INT32)
        return builder.bitcast(builder.shl(bits, INT32(16)), FLOAT)

    return types.float32(value), call


@compiled
def part(array: Array | None, begin: int, end: int) -> Any:
    """The entries [begin, end) of an array, or None of None."""
    return array[begin:end] if array is not None else None


@compiled
def to_bf16(value: Any) -> Any:
    """The bits of bf16 of an fp32 number (`samo/precision.py`)."""
    high = np.uint32(to_bits(value) + HALF_UNIT) >> SIXTEEN
    return np.uint16(high) if value == value else QUIET_NAN


@compiled
def store(master: Any, weight: Any, at: int, value: Any) -> None:
    """Store an fp32 master; where the weight is bf16, round it to that."""
    master[at] = value
    if weight is not None:
        weight[at] = to_bf16(value)


@compiled
def adamw_moments(
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


@compiled
def adamw_apply(
    master: Array, weight: Array | None, mean: Array, square: Array, factors: tuple[Any, ...]
) -> None:
    decay, correction, eps, rate = factors[3], factors[4], factors[5], factors[6]
    for i in range(mean.size):
        denominator = np.sqrt(square[i]) / correction + eps
        store(master, weight, i, master[i] * decay + rate * mean[i] / denominator)


@compiled
def adamw_step(
    gradient: Array,
    factor: Any,
    moments: tuple[Array, Array],
    master: Array,
    weight: Array | None,
    factors: tuple[Any, ...],
) -> None:
    mean, square = moments
    for begin in range(0, mean.size, STRETCH):
        end = min(begin + STRETCH, mean.size)
        near, far = mean[begin:end], square[begin:end]
        adamw_moments(gradient[begin:end], factor, near, far, factors)
        adamw_apply(master[begin:end], part(weight, begin, end), near, far, factors)


@compiled
def sgd_step(
    gradient: Array,
    factor: Any,
    moments: tuple[Array] | None,
    master: Array,
    weight: Array | None,
    factors: tuple[Any, ...],
) -> None:
    weight_decay, damping, rate, nesterov = factors[0], factors[1], factors[2], factors[3]
    for i in range(gradient.size):
        direction = widened(gradient[i]) * factor
        value = master[i]
        if weight_decay != 0:
            direction = multiply_add(weight_decay, value, direction)
        if moments is not None:
            momentum = moments[0]
            momentum[i] = momentum[i] * damping + direction
            if nesterov != 0:
                direction = multiply_add(damping, momentum[i], direction)
            else:
                direction = momentum[i]
        value = multiply_add(rate, direction, value)
        store(master, weight, i, value)


# Reason: an argument for each array and number, as numba takes them.
@compiled
def add_integers(values: Array, scale: Any, sums: Array, adds: int, most: Array) -> None:
    """Add round(value * scale), ties to even, to each sum, or store it if `adds` is 0; `most` has
    the largest absolute value so far, in bits of fp32, by which NaN is larger than infinity.

    Not all processors turn numbers into integers of 64 bits, but adding 1.5 * 2**52 rounds a number
    below 2**51 to one, which its last bits then have. So a product, of which 24 bits count, is
    rounded in two parts. The bits of 1.5 * 2**52 are shifted out of the upper part.
    """
    largest, down = np.uint32(0), scale * DOWN
    for i in range(values.size):
        value = widened(values[i])
        largest = max(largest, np.uint32(to_bits(value) & ABSOLUTE))
        wide = np.float64(value)
        upper = multiply_add(wide, down, ROUNDING)
        lower = multiply_add(ROUNDING - upper, UP, wide * scale) + ROUNDING
        before = sums[i] if adds else np.int64(0)
        high, low = to_bits(upper) << PART_BITS, to_bits(lower) - ROUNDING_BITS
        sums[i] = before + high + low
    most[0] = max(most[0], largest)


def _sum_of_squares(values: Array, sums: Array) -> None:
    total = 0.0
    for i in range(values.size):
        value = np.float64(widened(values[i]))  # whose square is exact
        total += value * value
    sums[0] = total


# Of this sum only the rounding to fp32 counts, so it is added in the order of vector instructions.
sum_of_squares = compiled(_sum_of_squares, fastmath={"reassoc"})
