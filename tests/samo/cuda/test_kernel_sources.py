"""The kernels' source goes through NVIDIA's compiler (by ctypes); no GPU is needed for that."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from support.cuda_on_cpu import ALL, COMMON, GRADIENTS, MOMENTA, instances
from support.exhaustive import by_default

from axsparse.samo.cuda.launch import FILES, read_source, source

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


needs_nvrtc = pytest.mark.skipif(library() is None, reason="NVRTC is not installed")
SAMPLE = [
    *(
        f"{kernel}<{index}, {types}>"
        for kernel in ("compress", "step_adamw")
        for index, types in zip(ALL * 2, GRADIENTS, strict=False)
    ),
    *instances("step_sgd", ["MaskIndex"], GRADIENTS[1:2], MOMENTA),
    *COMMON,
]
"""Every template with every value of every parameter; every combination runs on the emulator."""


@needs_nvrtc
@pytest.mark.parametrize("architecture", by_default(["sm_90"], ["sm_80", "sm_90"]))
def test_kernels_compile_for_gpus_and_keep_all_they_have_in_registers(architecture: str) -> None:
    status, log, code = compiled(source(read_source("device")), SAMPLE, architecture)

    assert status == 0, log
    assert code.startswith(b"\x7fELF")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert len(frames) == len(SAMPLE)
    assert set(frames) == {("0", "0")}


def test_outside_of_the_arithmetic_nothing_is_of_one_maker_only() -> None:
    text = "".join(map(read_source, FILES))

    assert not re.findall(r"\basm\b|\w+_sync\(|0xFFFFFFFFu, ", text)
