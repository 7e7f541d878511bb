"""The launcher for GPUs: CuPy compiles each kernel with NVRTC at its first use.

Compiled kernels stay in memory, and CuPy keeps them in a folder of the user too
(`CUPY_CACHE_DIR`), so that the next run loads them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axsparse.runtime.errors import ConfigError
from axsparse.samo.cuda.launch import THREADS, Argument, pointer, read_source, source

OPTIONS = ("--std=c++17",)


@dataclass(frozen=True)
class TorchStream:
    """One of torch's streams, in the form in which CuPy takes streams of other libraries."""

    handle: int
    """Its address, as CUDA knows it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """The version of CuPy's stream protocol, and the stream."""
        return 0, self.handle


class CupyLauncher:
    """Runs kernels on one device, on torch's current stream and so in order with torch."""

    def __init__(self, device: int) -> None:
        """`device` is torch's number of the GPU. ConfigError if CuPy is missing or fails."""
        self._cupy = _import_cupy()
        self._kernels: dict[str, Any] = {}
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
        stream = TorchStream(torch.cuda.current_stream(self._device).cuda_stream)
        with self._cupy.cuda.Device(self._device), self._taken(stream):
            self._kernel(kernel)((blocks,), (THREADS,), values)

    def _taken(self, stream: TorchStream) -> Any:
        """One of torch's streams as CuPy's; builds for ROCm may know the older way only."""
        streams = self._cupy.cuda
        if hasattr(streams.Stream, "from_external"):
            return streams.Stream.from_external(stream)
        return streams.ExternalStream(stream.handle)

    def _kernel(self, name: str) -> Any:
        found = self._kernels.get(name)
        if found is None:
            module = self._cupy.RawModule(
                code=source(read_source("device")), options=OPTIONS, name_expressions=[name]
            )
            try:
                with self._cupy.cuda.Device(self._device):
                    found = module.get_function(name)
            except (self._cupy.cuda.compiler.CompileException, RuntimeError) as error:
                raise ConfigError(
                    "samo: CuPy cannot compile kernels for this GPU ("
                    f"{_first_line(error)}); {_compiler()} has to be "
                    "installed, with CuPy or by the site's CUDA or ROCm module"
                ) from error
            self._kernels[name] = found
        return found


def _import_cupy() -> Any:
    major = (torch.version.cuda or "12").partition(".")[0]
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            f"samo: kernels for GPUs need CuPy, which cannot be imported ({_first_line(error)}); "
            f"{cupy_package(torch.version.cuda)}"
        ) from error
    # Builds for ROCm may have no newer version; they take streams the older way.
    if torch.version.hip is None and not hasattr(cupy.cuda.Stream, "from_external"):
        raise ConfigError(
            f"samo: CuPy {cupy.__version__} cannot take torch's streams, as it can from 14 on; "
            f"pip install 'cupy-cuda{major}x>=14'"
        )
    return cupy


def cupy_package(cuda: str | None) -> str:
    """How to get the CuPy that fits a torch of this CUDA; None: a torch of ROCm, or of none."""
    if cuda is None and torch.version.hip is not None:
        major = ".".join(torch.version.hip.split(".")[:2])
        return f"install CuPy's build for ROCm {major}"
    return f"pip install cupy-cuda{(cuda or '12').partition('.')[0]}x"


def _compiler() -> str:
    if torch.version.hip is not None:
        return f"hiprtc of ROCm {torch.version.hip}"
    return f"NVRTC of CUDA {torch.version.cuda}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
