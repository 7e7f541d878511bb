"""Kernels in the source of the package, compiled for this processor and run thread by thread.

What is C++ is the package's to the letter, also the arithmetic, which is the one for AMD's GPUs;
`cuda_on_cpu.h` stands in for the device. So no instruction of NVIDIA's may be among it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from axsparse.samo.cuda.device_index import BITS, INDICES
from axsparse.samo.cuda.launch import NUMBERS, Argument, pointer, read_source, source

HEADER = Path(__file__).with_suffix(".h")
OPTIONS = ("-std=c++17", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


Value: TypeAlias = (
    "ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes.Array[ctypes.c_char]"
)


def compiler() -> str | None:
    """A C++ compiler of this machine, if it has one for which the emulator is written."""
    return next((found for name in ("g++", "clang++") if (found := shutil.which(name))), None)


class EmulatedLauncher:
    """Runs kernels that were named when it was made, on tensors of the CPU.

    They are compiled in a folder; what another made there of the same names is taken as it is.
    """

    def __init__(self, kernels: Iterable[str], folder: Path) -> None:
        self._number = {name: number for number, name in enumerate(kernels)}
        self._seed = 0
        self.launched: list[str] = []
        program, library = folder / "kernels.cpp", folder / "kernels.so"
        exported = "".join(
            f'extern "C" int run_{number}(unsigned blocks, uint64_t seed, void** arguments) '
            f"{{ return emulate({name}, blocks, seed, arguments); }}\n"
            f'extern "C" const char* takes_{number}() {{ return signature({name}); }}\n'
            for name, number in self._number.items()
        )
        if library.exists():
            self._library = ctypes.CDLL(os.fspath(library))
            return
        device = HEADER.read_text(encoding="utf-8") + read_source("device")
        program.write_text(f"{source(device)}\n{exported}", encoding="utf-8")
        command = [str(compiler()), *OPTIONS, "-shared", "-fPIC", "-o", str(library), str(program)]
        if not _knows_half_precision():
            pytest.skip("this compiler knows no half precision")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        self._library = ctypes.CDLL(os.fspath(library))

    def __call__(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        number = self._number[kernel]
        takes = getattr(self._library, f"takes_{number}")
        takes.restype = ctypes.c_char_p
        given = "".join(map(_code, arguments))
        assert takes().decode() == given, f"{kernel} takes {takes()!r} and is given {given}"
        self.launched.append(kernel)
        values = [_value(argument) for argument in arguments]
        self._seed += 1
        run = getattr(self._library, f"run_{number}")
        run.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        good = run(blocks, self._seed, addresses) == 0
        assert good, f"{kernel}: threads wait for one another at different barriers"


def _knows_half_precision() -> bool:
    program = "_Float16 half(unsigned short bits) { return __builtin_bit_cast(_Float16, bits); }"
    command = [str(compiler()), *OPTIONS, "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    return done.returncode == 0


def _code(argument: Argument) -> str:
    if isinstance(argument, np.ndarray):
        return "s"
    if isinstance(argument, np.generic):
        return {"int64": "l", "int32": "i", "float32": "f"}[argument.dtype.name]
    return "p"


def _value(argument: Argument) -> Value:
    if isinstance(argument, np.ndarray):
        assert argument.size == 1, "CuPy takes arrays of one structure"
        return ctypes.create_string_buffer(argument.tobytes(), argument.nbytes)
    if isinstance(argument, np.float32):
        return ctypes.c_float(float(argument))
    if isinstance(argument, np.int32):
        return ctypes.c_int32(int(argument))
    return ctypes.c_int64(int(argument) if isinstance(argument, np.int64) else pointer(argument))


def instances(kernel: str, *axes: Iterable[str]) -> list[str]:
    """The names of a kernel's instances with every combination of template arguments."""
    return [f"{kernel}<{', '.join(values)}>" for values in product(*axes)]


ALL = tuple(INDICES.values())
GRADIENTS = ("Bf16, Bf16", "Bf16, Fp32", "Fp16, Fp16", "Fp16, Fp32", "Fp32, Fp32")
"""Types of weight and gradient."""
MOMENTA = ("NONE", "PLAIN", "NESTEROV")
COMMON = [
    *instances("sum_squares", NUMBERS.values()),
    *instances("move", [name for kind, name in INDICES.items() if kind != "full"], BITS.values()),
    *instances("expand", ALL, GRADIENTS),
    *instances("add_exact", ALL, NUMBERS.values()),
    *("fold", "finish_exact"),
]
EVERY = [
    *instances("compress", ALL, GRADIENTS),
    *instances("step_adamw", ALL, GRADIENTS),
    *instances("step_sgd", ALL, GRADIENTS, MOMENTA),
    *COMMON,
]
