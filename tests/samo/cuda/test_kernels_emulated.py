"""The kernels' own source, run thread by thread on this processor, and its contract."""

from __future__ import annotations

import pytest
import torch
from support.cuda_on_cpu import EVERY, EmulatedLauncher, compiler
from support.kernel_contract import CONTRACT, Machine, Promise


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    return EmulatedLauncher(EVERY, tmp_path_factory.mktemp("kernels"))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++ or clang++)")
@pytest.mark.parametrize("promise", CONTRACT.values(), ids=CONTRACT)
def test_kernels_on_the_emulator_keep_their_contract(
    promise: Promise, launch: EmulatedLauncher
) -> None:
    promise(Machine(launch, torch.device("cpu")))
