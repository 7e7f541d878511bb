"""Phases by CUDA events, on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from axsparse.observe.phases import PHASES, DevicePhases
from axsparse.runtime.gpu.cuda_device import CudaDevice


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is to be had here")
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
