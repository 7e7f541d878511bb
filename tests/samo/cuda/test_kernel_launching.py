"""How kernels reach a GPU: through a CuPy that stands in for the real one, and without one."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from axsparse.runtime.errors import ConfigError
from axsparse.samo import state_bytes as memory
from axsparse.samo.cuda.device_index import make_device_index
from axsparse.samo.cuda.launch import TENSORS, THREADS, Argument, CupyLauncher, TorchStream


class CompileError(Exception):
    """As CuPy's."""


class StandInCupy:
    """Writes down what is compiled and started."""

    __version__ = "13.4.1"

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.compiled: list[str] = []
        self.started: list[tuple[str, Any, Any, Any]] = []
        self.streams: list[tuple[int, int]] = []
        self.cuda = SimpleNamespace(
            Device=nullcontext,
            runtime=SimpleNamespace(getDevice=lambda: 0),
            Stream=SimpleNamespace(from_external=self._stream),
            compiler=SimpleNamespace(CompileException=CompileError),
        )

    def _stream(self, stream: TorchStream) -> nullcontext[None]:
        self.streams.append(stream.__cuda_stream__())
        return nullcontext()

    def RawModule(
        self, *, code: str, options: tuple[str, ...], name_expressions: list[str]
    ) -> SimpleNamespace:
        def get_function(name: str) -> Any:
            if self.failure is not None:
                raise self.failure
            assert [name] == name_expressions
            assert "sqrt.rn.f32" in code
            self.compiled.append(name)
            return lambda *call: self.started.append((name, *call))

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def launcher(monkeypatch: pytest.MonkeyPatch, cupy: StandInCupy) -> CupyLauncher:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return CupyLauncher(3)


@pytest.mark.usefixtures("on_device")
def test_a_kernel_is_compiled_once_and_started_on_torchs_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = StandInCupy()
    launch = launcher(monkeypatch, cupy)
    tensor = torch.zeros(3)

    structure = np.zeros(1, TENSORS)

    launch("sum_squares<Fp32>", 5, tensor, None, np.int64(4), np.float32(0.5), structure)
    launch("sum_squares<Fp32>", 6, tensor)
    launch("sum_squares<Fp32>", 0)

    assert cupy.compiled == ["fold", "sum_squares<Fp32>"]
    assert cupy.streams == [(0, 77)]  # kept for the second launch
    name, grid, block, arguments = cupy.started[0]
    assert (name, grid, block) == ("sum_squares<Fp32>", (5,), (THREADS,))
    assert arguments[:4] == (tensor.data_ptr(), 0, 4, 0.5)
    assert [value.dtype.name for value in arguments[:4]] == ["uint64"] * 2 + ["int64", "float32"]
    assert arguments[4] is structure


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("failure", [CompileError, RuntimeError])
def test_a_compiler_that_is_missing_or_fails_is_said_at_once_in_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    cupy = StandInCupy(failure("libnvrtc.so.12 was not found\nand more"))

    with pytest.raises(
        ConfigError, match=r"kernels for this GPU \(libnvrtc.so.12 was not found\); NVRTC of"
    ):
        launcher(monkeypatch, cupy)


@pytest.mark.parametrize(
    ("streams", "why"),
    [(None, "import of cupy halted"), (SimpleNamespace(), "has no attribute 'from_external'")],
)
def test_a_cupy_that_is_missing_or_too_old_is_refused_before_the_first_launch(
    monkeypatch: pytest.MonkeyPatch, streams: Any, why: str
) -> None:
    cupy = StandInCupy()
    cupy.cuda.Stream = streams
    monkeypatch.setitem(sys.modules, "cupy", cupy if streams else None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    said = (
        rf"kernels for GPUs need CuPy from version 14 on \(.*{why}.*\); pip install 'cupy-cuda12x"
    )
    with pytest.raises(ConfigError, match=said):
        CupyLauncher(3)
    assert cupy.compiled == []


# -- what is refused before a kernel sees it ------------------------------------------------


def nothing(kernel: str, blocks: int, *arguments: Argument) -> None:
    """Runs no kernel."""


def test_more_kept_entries_than_int32_can_count_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "INT32_LIMIT", 6)

    why = r"keeps at most \d+ entries and this one keeps 7; prune"
    with pytest.raises(ConfigError, match=why):
        make_device_index(nothing, torch.arange(10) < 7, "mask")
