"""NVIDIA's compiler of CUDA source, which needs no GPU, through ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")
"""Where the wheels of CUDA 13 and 12 have it, in the package `nvidia`."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiler, if one is installed: as a wheel, or by the system."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    wheels = [
        str(path)
        for root in roots
        for folder in FOLDERS
        for name in NAMES
        if (path := Path(root) / folder / name).exists()
    ]
    return next((found for place in [*wheels, *NAMES] if (found := _opened(place))), None)


def _opened(place: str) -> ctypes.CDLL | None:
    try:
        # A wheel's compiler asks for this by name when it compiles, and it is on no search path.
        for builtins in Path(place).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        return ctypes.CDLL(place)
    except OSError:
        return None


def compiled(source: str, kernels: Sequence[str], architecture: str) -> tuple[int, str, bytes]:
    """Status (0: good), the compiler's log with a report on each kernel, and the machine code."""
    nvrtc = library()
    assert nvrtc is not None
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _good(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None))
    for kernel in kernels:
        _good(nvrtc.nvrtcAddNameExpression(program, kernel.encode()))
    options = ["--std=c++17", f"-arch={architecture}", "-ftz=true", "--ptxas-options=-v"]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = int(nvrtc.nvrtcCompileProgram(program, len(options), encoded))
    _good(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _good(nvrtc.nvrtcGetProgramLog(program, log))
    code = b""
    if status == 0:
        _good(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        machine_code = ctypes.create_string_buffer(size.value)
        _good(nvrtc.nvrtcGetCUBIN(program, machine_code))
        code = machine_code.raw
    _good(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return status, log.value.decode(), code


def _good(status: int) -> None:
    assert status == 0, f"NVRTC answers {status}"
