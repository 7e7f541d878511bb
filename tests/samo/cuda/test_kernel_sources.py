"""The kernels' source goes through NVIDIA's compiler; no GPU is needed for that."""

from __future__ import annotations

import re

import pytest
from support import kernel_names as names
from support import nvrtc

from axsparse.samo.cuda.device_index import INDICES
from axsparse.samo.cuda.launch import CONSTANTS, FILES, read_source, source

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")
SAMPLE = [
    *(
        f"compress<{index}, {numbers}>"
        for index, numbers in zip([*INDICES.values(), "MaskIndex"], names.GRADIENTS, strict=True)
    ),
    *(
        f"step_adamw<{index}, {state}>"
        for index, state in zip([*INDICES.values()] * 2, names.STATES, strict=False)
    ),
    *(f"step_sgd<MaskIndex, {names.STATES[1]}, {kind}>" for kind in ("NONE", "PLAIN", "NESTEROV")),
    *names.JUDGE,
    *names.HELPERS,
]
"""Every template with every value of every parameter; every combination runs on the emulator."""


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile_for_gpus_and_keep_all_they_have_in_registers(architecture: str) -> None:
    status, log, code = nvrtc.compiled(source(read_source("device")), SAMPLE, architecture)

    assert status == 0, log
    assert code.startswith(b"\x7fELF")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert len(frames) == len(SAMPLE)
    assert set(frames) == {("0", "0")}


@needs_nvrtc
def test_a_mistake_in_the_source_is_found() -> None:
    status, log, code = nvrtc.compiled(source("#define ON_DEVICE __device__"), SAMPLE, "sm_90")

    assert status != 0
    assert 'identifier "half_to_float" is undefined' in log
    assert code == b""


def test_the_source_names_no_number_twice() -> None:
    """Sizes of blocks have one place each, and come into the source from there."""
    text = "".join(map(read_source, FILES))

    written = set(re.findall(r"(?<![\w.])(\d{3,})(?![\w.])", text))

    assert written & {str(value) for value in CONSTANTS.values() if value > 64} == set()
    assert all(re.search(rf"\b{name}\b", text) for name in CONSTANTS)
