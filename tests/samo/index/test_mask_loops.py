"""Words of kept entries by the processor's instructions, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

numba = pytest.importorskip("numba")
loops = pytest.importorskip("axsparse.samo.index.mask_loops")
put_word, take_word = loops.put_word, loops.take_word

Numbers: TypeAlias = NDArray[Any]
WORDS = [0, 1, 1 << 63, (1 << 64) - 1, 0x0123456789ABCDEF, 0xFFFF, 0xFFFF << 32, 0x80008000 << 31]


def take(dense: Numbers, at: int, bits: int, values: Numbers, number: int) -> int:
    count: int = take_word(dense, at, bits, values, number)
    return count


def put(dense: Numbers, at: int, bits: int, values: Numbers, number: int) -> int:
    count: int = put_word(dense, at, bits, values, number)
    return count


def moved(loop: Callable[..., int], bits: int, dense: Numbers, values: Numbers) -> int:
    """The number of entries that a compiled loop moved, from 3 on, to or from 5 on."""
    count: int = numba.njit(loop)(dense, np.int64(3), np.uint64(bits), values, np.int64(5))
    return count


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_the_entries_of_a_word_are_taken_and_put_in_order_and_no_others(dtype: DTypeLike) -> None:
    probe = np.zeros(80, dtype)
    if moved(take, 0, probe, probe.copy()) < 0:
        pytest.skip("the processor has no instruction for it")
    for bits in WORDS:
        numbers, blank = np.arange(1, 81, dtype=dtype), np.full(80, -1, dtype)
        kept = np.array([at for at in range(64) if bits >> at & 1], dtype=np.intp)
        values, dense, expected = blank.copy(), blank.copy(), blank.copy()
        expected[3 + kept] = numbers[5 : 5 + len(kept)]

        assert moved(take, bits, numbers, values) == moved(put, bits, dense, numbers) == len(kept)

        assert values[5 : 5 + len(kept)].tolist() == numbers[3 + kept].tolist()
        assert (values[:5] == -1).all()
        assert (values[69:] == -1).all()
        assert numbers.tolist() == list(range(1, 81))
        assert dense.tolist() == expected.tolist()


@pytest.mark.parametrize("loop", [take, put])
def test_nothing_moves_where_there_is_no_instruction(loop: Callable[..., int]) -> None:
    """Of types and strides that vectors do not have."""
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
