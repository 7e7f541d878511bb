"""Loops in machine code where numba is installed (the extra `fast`); elsewhere there are none.

Imported with the first use: numba costs two seconds, to load and to compile, and some 110 MB a
process.
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
"""Entries of a tensor for which numpy does: a process compiles for two seconds, in which it moves
them a thousand times."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


@cache
def compiled(loop: Loop) -> Loop | None:
    """A loop over arrays and numbers as machine code, for each type that it meets.

    None without numba, or with one that does not fit this numpy.
    """
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None
    machine_code: Loop = numba.njit(nogil=True)(loop)
    return machine_code


def same_size_integers(
    dense_D: Tensor, values_K: Tensor, numel: int, most: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bits of both as arrays of integers, which numpy has for every size.

    Machine code checks nothing, so sizes are checked here: the dense tensor's, and that
    there are at most so many values.
    """
    assert dense_D.dtype == values_K.dtype, f"{dense_D.dtype} and {values_K.dtype}"
    assert dense_D.shape == (numel,), f"{tuple(dense_D.shape)} for {numel} entries"
    assert values_K.ndim == 1, f"{values_K.ndim} dimensions"
    assert values_K.numel() <= most, f"{values_K.numel()} values for {most} kept entries"
    dtype = INTEGERS[dense_D.itemsize]
    return dense_D.view(dtype).numpy(), values_K.view(dtype).numpy()
