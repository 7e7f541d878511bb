"""What a kernel is called with, and the source that all kernels come from.

Kernels are C++ templates in `source/`. A launcher (`compile.py` has the one for GPUs) is told
which instance to run, as a C++ name such as `compress<MaskIndex, Bf16, Fp32>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASK_BLOCK, MASK_WORD, UINT16_BLOCK

THREADS = 128
"""Of a thread block."""
TILE = 32 * THREADS
"""Dense entries that a thread block writes: a word of the mask for each thread."""
CHUNK = 2048
"""Kept entries that a thread block reads, and sums squares of. Part of the numerics: see
`source/compress.cuh`."""
assert UINT16_BLOCK % TILE == 0 == TILE % MASK_BLOCK
assert BLOCK % CHUNK == 0 == CHUNK % THREADS

TENSOR = np.dtype(
    [
        *((name, np.uint64) for name in ("weight", "entries", "offsets")),
        *((name, np.int64) for name in ("kept", "numel")),
        *((name, np.uint64) for name in ("gradient", "master", "moment", "other_moment")),
        *((name, np.int64) for name in ("first", "last", "block")),
    ]
)
"""What a step is told of a tensor, as `source/step.cuh` has it: addresses and counts."""
GROUP = 32
"""Tensors that one launch steps at most: 3 kB of the 4 that it may be given."""
TENSORS = np.dtype([("tensors", TENSOR, (GROUP,)), ("number", np.int64)])

CONSTANTS = {
    "THREADS": THREADS,
    "TILE": TILE,
    "CHUNK": CHUNK,
    "SUM_BLOCK": BLOCK,
    "UINT16_BLOCK": UINT16_BLOCK,
    "MASK_BLOCK": MASK_BLOCK,
    "MASK_WORD": MASK_WORD,
    "GROUP": GROUP,
    "GROUP_BYTES": TENSORS.itemsize,
}
FILES = ("numbers", "index", "compress", "step", "helpers")
NUMBERS = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
"""How the source calls the types of weights and gradients."""

Argument: TypeAlias = "Tensor | np.int64 | np.int32 | np.float32 | NDArray[np.void] | None"
"""A tensor is passed as the address of its first entry, None as a null pointer, an array of one
structure as its contents."""


class Launcher(Protocol):
    """Runs kernels in order, on the device and stream that are current where it is called."""

    def __call__(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        """Start so many thread blocks of THREADS each; none is no mistake and does nothing."""
        ...


@cache
def source(arithmetic: str) -> str:
    """All kernels, on top of what gives them the arithmetic of their processor."""
    constants = "".join(f"#define {name} {value}\n" for name, value in CONSTANTS.items())
    return "\n".join([constants, arithmetic, *(read_source(name) for name in FILES)])


def read_source(name: str) -> str:
    """A file of `source/`."""
    return (Path(__file__).parent / "source" / f"{name}.cuh").read_text(encoding="utf-8")


def pointer(argument: Tensor | None) -> int:
    """The address that a kernel is given."""
    return 0 if argument is None else argument.data_ptr()


def check(tensor: Tensor, name: str, dtypes: Sequence[torch.dtype], numel: int) -> None:
    """Kernels check nothing, so this does: type, size, and that entries follow one another."""
    assert tensor.dtype in dtypes, f"{name}: {tensor.dtype}"
    assert tensor.shape == (numel,), f"{name}: {tuple(tensor.shape)} for {numel} entries"
    assert tensor.is_contiguous(), f"{name}: entries do not follow one another"


def blocks_of(entries: int, each: int) -> int:
    """Thread blocks for so many entries."""
    return -(-entries // each)
