"""Words of kept entries by the processor's instructions, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from axsparse.samo.index.mask_loops import put_word, take_word

numba = pytest.importorskip("numba")
pytest.importorskip("axsparse.samo.index.numba_intrinsics")

Numbers: TypeAlias = NDArray[Any]
WORDS = [0, 1, 1 << 63, (1 << 64) - 1, 0x0123456789ABCDEF, 0xFFFF, 0xFFFF << 32, 0x80008000 << 31]


def take(dense: Numbers, at: int, bits: int, values: Numbers, number: int) -> int:
    return take_word(dense, at, bits, values, number)


def put(dense: Numbers, at: int, bits: int, values: Numbers, number: int) -> int:
    return put_word(dense, at, bits, values, number)


def moved(loop: Callable[..., int], bits: int, dense: Numbers, values: Numbers) -> int:
    """What a compiled loop says that it moved, of entries from 3 on, to or from 5 on."""
    count: int = numba.njit(loop)(dense, np.int64(3), np.uint64(bits), values, np.int64(5))
    return count


def kept(bits: int) -> NDArray[np.intp]:
    return np.array([at for at in range(64) if bits >> at & 1], dtype=np.intp)


def needs_instructions(dtype: DTypeLike) -> None:
    probe = np.zeros(80, dtype)
    if moved(take, 0, probe, probe.copy()) < 0:
        pytest.skip("the processor has no instruction for it")


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("bits", WORDS)
def test_the_entries_of_a_word_are_taken_in_order(dtype: DTypeLike, bits: int) -> None:
    needs_instructions(dtype)
    dense, values = np.arange(1, 81, dtype=dtype), np.full(80, -1, dtype)

    count = moved(take, bits, dense, values)

    assert values[5 : 5 + count].tolist() == dense[3 + kept(bits)].tolist()
    assert count == bits.bit_count()
    assert (values[:5] == -1).all()
    assert (values[69:] == -1).all()
    assert dense.tolist() == list(range(1, 81))


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
@pytest.mark.parametrize("bits", WORDS)
def test_the_entries_of_a_word_are_put_in_order_and_no_others(dtype: DTypeLike, bits: int) -> None:
    needs_instructions(dtype)
    dense, values = np.full(80, -1, dtype), np.arange(1, 81, dtype=dtype)
    wanted = dense.copy()
    wanted[3 + kept(bits)] = values[5 : 5 + bits.bit_count()]

    count = moved(put, bits, dense, values)

    assert dense.tolist() == wanted.tolist()
    assert count == bits.bit_count()


@pytest.mark.parametrize("loop", [take, put])
def test_nothing_moves_where_there_is_no_instruction(loop: Callable[..., int]) -> None:
    """Of types and strides that vectors do not have, and in Python."""
    cases: list[tuple[Numbers, Numbers]] = [
        (np.arange(80), np.zeros(80, np.int64)),
        (np.arange(160, dtype=np.int16)[::2], np.zeros(80, np.int16)),
        (np.arange(80, dtype=np.int32), np.zeros(80, np.int16)),
    ]
    for dense, values in cases:
        before = dense.copy(), values.copy()

        assert moved(loop, (1 << 64) - 1, dense, values) == -1
        assert (dense == before[0]).all()
        assert (values == before[1]).all()
        assert take_word(dense, 0, 1, values, 0) == put_word(dense, 0, 1, values, 0) == -1
