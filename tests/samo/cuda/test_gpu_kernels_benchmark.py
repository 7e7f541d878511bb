"""What `benchmarks/gpu_kernels.py` does before it has a GPU: bounds, arguments, and its refusal."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.cuda_on_cpu import COMPRESS, HELPERS, JUDGE, STEP, EmulatedLauncher, compiler

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_kernels.py"
MILLION = 1_000_000
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks/ is not here")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kind", "compressing", "stepping", "split"),
    [("int32", 2.63, 5.00, 6.23), ("mask", 2.36, 4.73, 5.96)],
)
def test_a_tenth_of_the_entries_moves_so_many_bytes_a_parameter(
    benchmark: ModuleType, kind: str, compressing: float, stepping: float, split: float
) -> None:
    numel, kept = 100 * MILLION, 10 * MILLION

    found = (
        benchmark.compress_bytes(numel, kept, kind),
        benchmark.step_bytes(numel, kept, kind, 2),
        benchmark.step_bytes(numel, kept, kind, 2, "remainder"),
    )

    assert [value / numel for value in found] == pytest.approx(
        [compressing, stepping, split], abs=0.006
    )


def test_without_a_gpu_it_says_so_and_ends_with_69(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(SystemExit) as end:
        benchmark.main(["--rounds", "3"])

    assert end.value.code == 69
    assert "no CUDA device is here" in capsys.readouterr().out


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++ or clang++)")
def test_everything_that_it_measures_runs_and_has_a_bound(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    wanted = [name for name in COMPRESS + STEP if "Bf16, Bf16" in name] + JUDGE + HELPERS
    mask = torch.rand(9000, generator=torch.Generator().manual_seed(1)) < 0.1

    made, moved = benchmark.calls(EmulatedLauncher(wanted, tmp_path), mask, torch.device("cpu"))
    for call in made.values():
        call()

    assert made.keys() == moved.keys()
    assert len(made) == 1 + 3 * 4 + 2
