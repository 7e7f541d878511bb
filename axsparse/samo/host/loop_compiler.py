"""The process that compiles a loop for `compiled_loops.py`: the only one that loads numba.

It reads a job in JSON from its standard input and writes the loop's object file to its standard
output; or it ends with the reason why not, in one line.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import numpy as np
from llvmlite import binding
from numba import types
from numba.core import codegen, config
from numba.np import numpy_support

from axsparse.runtime.errors import one_line
from axsparse.samo.host.compiled_loops import Kind, flat_types

LIBRARY = {"memcpy", "memmove", "memset", "sqrtf"}
"""Functions outside of an object file that it may call; every process with Python has them."""
FREED = re.compile(r"^declare void @NRT_MemInfo_call_dtor\(([^ )]+).*$", re.MULTILINE)
"""Matches the function that frees an array, which numba never calls for arrays of a caller."""
# None of these is typed.
_types: Any = types
_codegen: Any = codegen
_config: Any = config
_support: Any = numpy_support


def main() -> None:
    job = json.load(sys.stdin)
    binding.initialize_native_asmparser()  # for loops with instructions by their names
    try:
        code = _object(job["module"], job["name"], _tuples(job["kinds"]), job["symbol"])
    except Exception as error:  # of any kind, the caller has to learn of it
        sys.exit(one_line(error))
    sys.stdout.buffer.write(code)


def _object(module: str, name: str, kinds: tuple[Kind, ...], symbol: str) -> bytes:
    """The object file of a loop, with the name of its function."""
    loop = getattr(importlib.import_module(module), name)
    signature = tuple(map(_type, kinds))
    loop.compile(signature)
    source = FREED.sub(
        "define internal void @NRT_MemInfo_call_dtor(\\1 %0) {\n  ret void\n}",
        loop.inspect_llvm(signature),
    )
    compiled = binding.parse_assembly(source)
    function = compiled.get_function(loop.overloads[signature].fndesc.llvm_func_name)
    function.name = symbol
    types_of = [str(argument.type) for argument in function.arguments]
    found = ["ptr" if each.endswith("*") else each for each in types_of]
    expected = ["ptr", "ptr", *flat_types(kinds)]
    if found != expected:
        raise TypeError(f"{name} takes {found}, not {expected}")
    outside = {
        each.name
        for each in compiled.functions
        if each.is_declaration and not each.name.startswith("llvm.")
    }
    if not outside <= LIBRARY:
        raise TypeError(f"{name} calls {sorted(outside - LIBRARY)}")
    code: bytes = _target().emit_object(compiled)
    return code


def _target() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = _config.CPU_NAME, _config.CPU_FEATURES
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name() if cpu is None else cpu,
        features=_codegen.get_host_cpu_features() if features is None else features,
        opt=3,
        jit=True,
    )


def _tuples(kinds: Any) -> Any:
    return tuple(map(_tuples, kinds)) if isinstance(kinds, list) else kinds


def _type(kind: Kind) -> Any:
    if isinstance(kind, tuple):
        return _types.Tuple([_type(each) for each in kind])
    simple = {"int": types.int64, "float32": types.float32, "float64": types.float64}
    if kind in simple:
        return simple[kind]
    if kind == "none":
        return types.none
    return _types.Array(_support.from_dtype(np.dtype(kind[0])), int(kind[1]), kind[2:] or "C")


if __name__ == "__main__":
    main()
