"""Loops in machine code: read from a cache of the user, or compiled by another process.

A loop is a Python function over arrays and numbers that numba can compile. A rank never loads
numba: another process does (`loop_compiler.py`), and writes a loop's object file to a folder that
all runs of the user share. A rank loads object files by llvmlite. A file's name says all that its
content depends on: the source, the processor, the versions of numba and llvmlite, the loop and the
types of its arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axsparse.runtime.files.atomic import new_path

Array: TypeAlias = NDArray[Any]
Kind: TypeAlias = "str | tuple[Kind, ...]"
"""The type of an argument: a character of numpy and a number of dimensions, such as `f1`, or `f1A`
where entries do not follow one another; `int`, `float32`, `float64`, `none`; a tuple of these."""

FEW = 1 << 15
"""Up to this number of entries a tensor is moved by numpy: it is as fast there, and a small model
loads no compiled loops."""
LENGTHS = (64, 128, 256)
"""Tokens that `sample` of `sparse_product_loops.py` adds the products of; as many as the last are
laid out at a time."""
COLUMNS = 512
"""Inputs that `sampled_product` lays out at a time: 256 KiB in the cache with 256 tokens."""
TILE = 64
"""Tokens whose sums `add_products` keeps in registers."""
LINES = 256
"""Lines of the weight whose entries `multiply` lists at a time."""
DEPTH = 512
"""Inputs whose weights `multiply` lists at a time: 64 tokens of this many stay in the cache."""
BF16_FEATURES = {"avx512bf16", "avx512vbmi2"}
"""The processor's instructions that loops on bf16 need."""
AVX2 = {"avx2", "fma"}
"""The instructions that the loops of `decode_loops.py` need."""
MATRIX_FEATURE = "amx-bf16"
"""The instruction of processors that multiply matrix tiles of bf16 at once."""
DIGEST = hashlib.sha256().digest_size
_RESULT = ctypes.create_string_buffer(16)
"""Memory for the result that every loop writes, which says that the loop returns nothing."""


class CompileError(RuntimeError):
    """A loop cannot be compiled here; the text is the compiler's."""


class Loop:
    """A function over arrays, numbers, None and tuples of these.

    Nothing is returned and nothing is checked. Other threads of Python run meanwhile.
    """

    def __init__(self, module: str, name: str) -> None:
        """`module` is loaded by the compiling process only, so it may import numba."""
        self._module, self._name = module, name
        self._functions: dict[tuple[Kind, ...], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: object) -> None:
        values: list[Any] = [_RESULT, None]
        kinds = tuple([_flatten(argument, values) for argument in arguments])
        function = self._functions.get(kinds) or self.load(kinds)
        status = function(*values)
        assert status == 0, f"{self._name}: {status}"

    def of_numbers(self, count: int) -> Callable[..., None]:
        """The loop for `count` whole numbers, without a look at what each argument is: a call takes
        a tenth of the time."""
        function = self.load((("int",) * count,))

        def call(*numbers: int) -> None:
            status = function(_RESULT, None, *numbers)
            assert status == 0, f"{self._name}: {status}"

        return call

    def load(self, kinds: tuple[Kind, ...]) -> Any:
        """The function for arguments of these types, compiled if no run has done so before.

        Raises CompileError.
        """
        with self._lock:
            if kinds not in self._functions:
                key = _key(self._module, self._name, kinds)
                path = cache_folder() / f"{key}.o"
                code = _read(path)
                if code is None:
                    with alone(cache_folder() / "lock"):
                        code = _read(path) or _compiled(self._module, self._name, kinds, path)
                self._functions[kinds] = _function(key, code, kinds)
            return self._functions[kinds]


NOTHING = Loop("axsparse.samo.index.mask_loops", "nothing")


@cache
def can_compile() -> bool:
    """Whether numba is installed and compiles loops, which compiling a small loop shows, once for
    all runs."""
    try:
        version("numba")
        NOTHING.load(("B1",))
    except (PackageNotFoundError, CompileError):
        return False
    return True


@cache
def cpu_features() -> frozenset[str]:
    """The processor's instructions for which loops are compiled, by LLVM's names."""
    known = os.environ.get("NUMBA_CPU_FEATURES")
    if known is None:
        from llvmlite import binding

        known = binding.get_host_cpu_features().flatten()
    return frozenset(word[1:] for word in known.split(",") if word.startswith("+"))


@cache
def has_bf16_loops() -> bool:
    """Whether loops on bf16 can be compiled and run here."""
    return can_compile() and cpu_features() >= BF16_FEATURES


def multiplies_matrices() -> bool:
    """Whether the processor has an instruction for matrix tiles of bf16 (AMX)."""
    return can_compile() and MATRIX_FEATURE in cpu_features()


@cache
def cache_folder() -> Path:
    """The folder of object files: `AXSPARSE_CACHE`, else a folder of the user's cache, else, where
    that cannot be written, a folder of this process."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("AXSPARSE_CACHE") or Path(base) / "axsparse") / "loops"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        mine = tempfile.mkdtemp(prefix="axsparse-loops-")
        atexit.register(shutil.rmtree, mine, ignore_errors=True)
        return Path(mine)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """A block that one process at a time enters, or all at once on a file system without locks."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _source() -> str:
    """A hash of everything that object files depend on, except the loop and its types."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parent.parent / "index"):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    known = [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    from llvmlite import binding

    known += [binding.get_host_cpu_name(), *sorted(cpu_features()), sys.version]
    known += [f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy")]
    digest.update("\n".join(known).encode())
    return digest.hexdigest()


def _key(module: str, name: str, kinds: tuple[Kind, ...]) -> str:
    content = json.dumps([_source(), module, name, kinds])
    return f"{name}_{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, code = content[:DIGEST], content[DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


# -- calling -----------------------------------------------------------------------------------


def _flatten(argument: Any, values: list[Any]) -> Kind:
    """Append an argument as numba takes it (`loop_compiler.py` checks it), and return its type."""
    if isinstance(argument, np.ndarray):
        about, shape = argument.__array_interface__, argument.shape
        values += (None, None, argument.size, argument.itemsize, about["data"][0])
        values += shape
        values += argument.strides
        return _array_kind(argument.dtype.char, len(shape), about["strides"] is None)
    if isinstance(argument, tuple):
        return tuple([_flatten(each, values) for each in argument])
    values.append(argument)
    if isinstance(argument, np.float32):
        return "float32"
    if isinstance(argument, float):
        return "float64"
    return "none" if argument is None else "int"


@cache
def _array_kind(char: str, dimensions: int, is_contiguous: bool) -> Kind:
    return f"{char}{dimensions}" + "A" * (not is_contiguous)


def flat_types(kind: Kind) -> list[str]:
    """LLVM's types of an argument as numba's functions take it."""
    if isinstance(kind, tuple):
        return [each for part in kind for each in flat_types(part)]
    simple = {"int": "i64", "float32": "float", "float64": "double", "none": "ptr"}
    if kind in simple:
        return [simple[kind]]
    return ["ptr", "ptr", "i64", "i64", "ptr", *["i64"] * (2 * int(kind[1]))]


_TYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64}
_TYPES |= {"float": ctypes.c_float, "double": ctypes.c_double}


@cache
def _engine() -> Any:
    """The owner of machine code, which lives as long as the process."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


_LOADING = threading.Lock()


def _function(key: str, code: bytes, kinds: tuple[Kind, ...]) -> Any:
    from llvmlite import binding

    with _LOADING:
        engine = _engine()
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = engine.get_function_address(key)
        _forget_pages_of_llvm()
    assert address, f"{key}: the object file has no such function"
    types = ["ptr", "ptr", *flat_types(kinds)]
    return ctypes.CFUNCTYPE(ctypes.c_int32, *(_TYPES[each] for each in types))(address)


def _forget_pages_of_llvm() -> None:
    """Free LLVM's own code, some 35 MB that loading has read; it is read again if needed."""
    with contextlib.suppress(OSError, AttributeError):
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for mapping in mappings:
            if " r-xp " in mapping and "llvmlite" in mapping:
                begin, end = (int(each, 16) for each in mapping.split()[0].split("-"))
                advise(begin, end - begin, mmap.MADV_DONTNEED)


# -- compiling ---------------------------------------------------------------------------------


def _compiled(module: str, name: str, kinds: Sequence[Kind], path: Path) -> bytes:
    """Have another process compile a loop, and keep it in a file. Raises CompileError."""
    job = json.dumps({"module": module, "name": name, "kinds": kinds, "symbol": path.stem})
    done = subprocess.run(
        [sys.executable, "-m", "axsparse.samo.host.loop_compiler"],
        input=job.encode(),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        said = done.stderr.decode().strip().splitlines()
        raise CompileError(said[-1] if said else f"the compiler ended with {done.returncode}")
    with new_path(path) as unfinished:
        unfinished.write_bytes(hashlib.sha256(done.stdout).digest() + done.stdout)
    return done.stdout
