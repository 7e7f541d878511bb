"""Kernels on a GPU, by the same contract as on the emulator, and phases by its events."""

from __future__ import annotations

import time

import pytest
import torch
from support.kernel_contract import CONTRACT, Machine, Promise

from axsparse.observe.phases import PHASES, DevicePhases
from axsparse.runtime.gpu.device import CudaDevice
from axsparse.samo.cuda.kernels import sum_squares
from axsparse.samo.cuda.launch import CupyLauncher
from axsparse.samo.shards import BLOCK

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)


@pytest.fixture(scope="module")
def launch() -> CupyLauncher:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return CupyLauncher(0)


@pytest.mark.parametrize("promise", CONTRACT.values(), ids=CONTRACT)
def test_kernels_on_a_gpu_keep_their_contract(promise: Promise, launch: CupyLauncher) -> None:
    promise(Machine(launch, torch.device("cuda")))


def test_kernels_wait_for_what_torch_has_begun_on_the_current_stream(launch: CupyLauncher) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        square = torch.full((4096, 4096), 1 / 4096, device="cuda")
        for _ in range(20):
            square = square @ square  # keeps every entry, and takes a while
        partials = square.new_empty(square.numel() // BLOCK, dtype=torch.float64)
        sum_squares(launch, [(square.view(-1), partials)])
        total = partials.sum()
    stream.synchronize()

    assert total.item() == pytest.approx(1.0, rel=1e-5)


def test_events_tell_a_busy_gpu_from_an_idle_one() -> None:
    phases = DevicePhases(CudaDevice(torch.device("cuda", 0)))

    for _ in range(2):  # marks are new, then set again
        phases.begin_step()
        with phases("compute"):
            torch.cuda._sleep(200_000_000)
        with phases("bubble"):
            torch.cuda.synchronize()
            idle = time.perf_counter()
            while time.perf_counter() < idle + 0.05:
                pass
        with phases("optimizer"):
            torch.cuda._sleep(100_000_000)
        seconds = dict(phases.end_step())

    assert seconds["bubble"] + seconds["other"] > 0.049
    assert seconds["compute"] > seconds["optimizer"] > 0.01
    assert sum(seconds[name] for name in PHASES) == pytest.approx(seconds["step"])
