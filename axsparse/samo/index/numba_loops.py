"""Loops compiled by numba, if it is installed.

numba is imported at the first use, since it costs every process two seconds, to load and to
compile, and some 110 MB.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

Loop: TypeAlias = Callable[..., None]
FEW = 1 << 15
"""Up to this number of entries a tensor is moved by numpy: in the two seconds that compiling takes,
numpy moves them a thousand times."""
AHEAD = 2048
"""Entries by which the memory that is read next is fetched early. After a backward, whose gradients
are not in the cache, a gather takes a third less time with it; that far ahead, in bf16, is another
page, whose address takes longest to find."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by its bytes."""


def prefetch(array: NDArray[Any], at: int) -> None:
    """Have the processor fetch an entry that will soon be read, which may lie beyond the end.

    Does nothing outside of a compiled loop.
    """


def take_word(dense: NDArray[Any], at: int, bits: int, values: NDArray[Any], number: int) -> int:
    """Copy the entries of 64, from `at` on, whose bits are set in a word, lowest first, to `values`
    from `number` on.

    Returns how many there are; −1, having done nothing, outside of a compiled loop and where the
    processor has no instructions for it. Of `values`, 64 entries must exist, and those behind the
    copied ones may get any numbers.
    """
    return -1


def put_word(dense: NDArray[Any], at: int, bits: int, values: NDArray[Any], number: int) -> int:
    """Copy entries of `values` from `number` on to those of `dense` that `take_word` reads; else
    like `take_word`."""
    return -1


@cache
def compiled(loop: Loop) -> Loop | None:
    """A loop over arrays and numbers, compiled for each combination of types at its first call.

    None if numba is missing or does not fit this version of numpy.
    """
    try:
        numba = importlib.import_module("numba")
        importlib.import_module("axsparse.samo.index.numba_intrinsics")
    except ImportError:
        return None
    machine_code: Loop = numba.njit(nogil=True)(loop)
    return machine_code


def same_size_integers(
    dense_D: Tensor, values_K: Tensor, numel: int, most: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both tensors as arrays of integers of the same bits, since numpy has no bf16.

    Compiled loops check nothing, so this does: `dense_D` has `numel` entries, and `values_K` has at
    most `most` of the same type.
    """
    assert dense_D.dtype == values_K.dtype, f"{dense_D.dtype} and {values_K.dtype}"
    assert dense_D.shape == (numel,), f"{tuple(dense_D.shape)} for {numel} entries"
    assert values_K.ndim == 1, f"{values_K.ndim} dimensions"
    assert values_K.numel() <= most, f"{values_K.numel()} values for {most} kept entries"
    dtype = INTEGERS[dense_D.itemsize]
    return dense_D.view(dtype).numpy(), values_K.view(dtype).numpy()
