"""The launcher protocol, the arguments of kernels, and their source.

Kernels are C++ templates in `source/`. A launcher receives the instance to run as a C++ name such
as `compress<MaskIndex, Bf16, Fp32>`. The launcher of GPUs has CuPy compile each kernel with NVRTC
at its first use, and keep it for the next run (`CUPY_CACHE_DIR`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.errors import ConfigError
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASK_BLOCK, MASK_WORD

THREADS = 128
"""Threads of a thread block."""
TILE = 32 * THREADS
"""Dense entries that a thread block writes: 32, half a word of the mask, for each thread."""
CHUNK = 2048
"""Kept entries whose squares a thread block sums; part of the numerics (`source/compress.cuh`)."""
assert TILE % MASK_BLOCK == 0
assert BLOCK % CHUNK == 0 == CHUNK % THREADS

TENSOR = np.dtype(
    [
        *((name, np.uint64) for name in ("weight", "entries", "offsets")),
        *((name, np.int64) for name in ("kept", "numel")),
        *((name, np.uint64) for name in ("gradient", "master", "moment", "other_moment")),
        *((name, np.int64) for name in ("first", "last", "block")),
    ]
)
"""The structure `Tensor` of `source/step.cuh`: addresses and counts of one tensor to update."""
GROUP = 32
"""Tensors that one launch updates at most: 3 kB of the 4 kB of arguments that a launch may have."""
TENSORS = np.dtype([("tensors", TENSOR, (GROUP,)), ("number", np.int64)])
"""The structure of the tensors of one launch."""

NORM_INPUT = np.dtype(
    [
        *((name, np.uint64) for name in ("gradient", "partials")),
        *((name, np.int64) for name in ("kept", "chunk", "first")),
    ]
)
"""The structure `NormInput` of `source/compress.cuh`: one gradient whose squares are summed."""
SUMMED = 64
"""Tensors whose squares one launch sums at most: 2.5 kB of arguments."""
NORM_INPUTS = np.dtype([("tensors", NORM_INPUT, (SUMMED,)), ("number", np.int64)])
"""The structure of the tensors of one launch."""

CONSTANTS = {
    "THREADS": THREADS,
    "TILE": TILE,
    "CHUNK": CHUNK,
    "SUM_BLOCK": BLOCK,
    "MASK_BLOCK": MASK_BLOCK,
    "MASK_WORD": MASK_WORD,
    "GROUP": GROUP,
    "GROUP_BYTES": TENSORS.itemsize,
    "SUMMED": SUMMED,
    "NORM_INPUTS_BYTES": NORM_INPUTS.itemsize,
}
OPTIONS = ("--std=c++17",)
FILES = ("numbers", "index", "compress", "step", "helpers", "exact")
NUMBERS = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
"""The names of the types of weights and gradients in the source."""

Argument: TypeAlias = "Tensor | np.int64 | np.int32 | np.float32 | NDArray[np.void] | None"
"""Tensors are passed by address, None as a null pointer, arrays of one structure by value."""


class Launcher(Protocol):
    """Runs kernels in order, on the device and stream that are current where it is called."""

    def __call__(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        """Start a kernel with a number of thread blocks of THREADS threads; 0 blocks do nothing.

        `kernel` is the C++ name of the instance. `arguments` are in the order of its parameters
        and must live until it has run; torch's allocator sees to that for tensors of the stream.
        """


@cache
def source(arithmetic: str) -> str:
    """The source of all kernels. `arithmetic` is the source of the operations that depend on the
    processor: `device` for GPUs, a stand-in of the tests for CPUs."""
    constants = "".join(f"#define {name} {value}\n" for name, value in CONSTANTS.items())
    return "\n".join([constants, arithmetic, *(read_source(name) for name in FILES)])


def read_source(name: str) -> str:
    return (Path(__file__).parent / "source" / f"{name}.cuh").read_text(encoding="utf-8")


def pointer(argument: Tensor | None) -> int:
    """The address of a tensor's first entry, 0 for None."""
    return 0 if argument is None else argument.data_ptr()


def check(tensor: Tensor, name: str, dtypes: Sequence[torch.dtype], numel: int) -> None:
    """Assert a tensor's type, size and contiguity, which kernels do not check."""
    assert tensor.dtype in dtypes, f"{name}: {tensor.dtype}"
    assert tensor.shape == (numel,), f"{name}: {tuple(tensor.shape)} for {numel} entries"
    assert tensor.is_contiguous(), f"{name}: entries do not follow one another"


def blocks_of(entries: int, each: int) -> int:
    """The number of thread blocks for `entries` at `each` a block."""
    return -(-entries // each)


# -- GPUs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchStream:
    """One of torch's streams, in the form in which CuPy takes streams of other libraries."""

    handle: int
    """The address of the stream, as CUDA knows it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """The version of CuPy's stream protocol, and the stream."""
        return 0, self.handle


class CupyLauncher:
    """Runs kernels on one device, on torch's current stream and so in order with torch."""

    def __init__(self, device: int) -> None:
        """`device` is torch's number of the GPU. ConfigError if CuPy is missing or fails."""
        self._cupy = _import_cupy()
        self._kernels: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}
        """CuPy's form of torch's streams, by their handle."""
        # Compiling the smallest kernel shows at once whether the compiler works.
        self._device = device
        self._kernel("fold")

    def __call__(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        if blocks == 0:
            return
        values = tuple(
            np.uint64(pointer(argument))
            if argument is None or isinstance(argument, Tensor)
            else argument
            for argument in arguments
        )
        handle = torch.cuda.current_stream(self._device).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._taken(TorchStream(handle))
        with self._on_device(), stream:
            self._kernel(kernel)((blocks,), (THREADS,), values)

    def _on_device(self) -> Any:
        """A block in which the device is CuPy's; where it is already, as in a training, this takes
        a twentieth of the time."""
        cuda = self._cupy.cuda
        if cuda.runtime.getDevice() == self._device:
            return nullcontext()
        return cuda.Device(self._device)

    def _taken(self, stream: TorchStream) -> Any:
        """One of torch's streams as CuPy's; builds for ROCm may know the older way only."""
        streams = self._cupy.cuda
        with streams.Device(self._device):
            if hasattr(streams.Stream, "from_external"):
                return streams.Stream.from_external(stream)
            return streams.ExternalStream(stream.handle)

    def _kernel(self, name: str) -> Any:
        kernel = self._kernels.get(name)
        if kernel is None:
            module = self._cupy.RawModule(
                code=source(read_source("device")), options=OPTIONS, name_expressions=[name]
            )
            try:
                with self._cupy.cuda.Device(self._device):
                    kernel = module.get_function(name)
            except (self._cupy.cuda.compiler.CompileException, RuntimeError) as error:
                raise ConfigError(
                    "samo: CuPy cannot compile kernels for this GPU ("
                    f"{_first_line(error)}); {_needed()[0]} has to be "
                    "installed, with CuPy or by the site's CUDA or ROCm module"
                ) from error
            self._kernels[name] = kernel
        return kernel


def _import_cupy() -> Any:
    try:
        cupy = importlib.import_module("cupy")
        if torch.version.hip is None:  # builds for ROCm may take streams the older way
            _ = cupy.cuda.Stream.from_external
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"samo: kernels for GPUs need CuPy from version 14 on ({_first_line(error)}); "
            f"{_needed()[1]}"
        ) from error
    return cupy


def _needed() -> tuple[str, str]:
    """The compiler of kernels for the GPUs of this torch, and how to get the CuPy that fits."""
    hip, cuda = torch.version.hip, torch.version.cuda
    if cuda is None and hip is not None:
        release = ".".join(hip.split(".")[:2])
        return f"hiprtc of ROCm {hip}", f"install CuPy's build for ROCm {release}"
    major = (cuda or "12").partition(".")[0]
    return f"NVRTC of CUDA {cuda}", f"pip install 'cupy-cuda{major}x>=14'"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
