"""The kernels on a GPU, by the same contract as on the emulator."""

from __future__ import annotations

import pytest
import torch
from support.kernel_contract import CONTRACT
from support.kernel_machine import Machine, Promise

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


def test_the_same_sums_come_out_of_every_run(launch: CupyLauncher) -> None:
    values = torch.randn(3_000_001, device="cuda")

    def once() -> list[float]:
        partials = values.new_empty(-(-values.numel() // BLOCK), dtype=torch.float64)
        sum_squares(launch, [(values, partials)])
        sums: list[float] = partials.tolist()
        return sums

    assert all(once() == once() for _ in range(10))
