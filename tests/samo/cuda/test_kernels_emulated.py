"""The kernels' own source, run thread by thread on this processor, and its contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda_on_cpu import EVERY, EmulatedLauncher, compiler
from support.kernel_contract import CONTRACT, Machine, Promise
from support.kernel_reference import multiply_add

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++ or clang++)")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    return EmulatedLauncher(EVERY, tmp_path_factory.mktemp("kernels"))


@needs_compiler
@pytest.mark.parametrize("promise", CONTRACT.values(), ids=CONTRACT)
def test_kernels_on_the_emulator_keep_their_contract(
    promise: Promise, launch: EmulatedLauncher
) -> None:
    promise(Machine(launch, torch.device("cpu")))


def test_multiply_add_rounds_once() -> None:
    """Just below halfway, where fp64 sees halfway and would round up to even."""
    a, b = np.float32(2**16 - 1), np.array([(2**16 + 1) * 2.0**-56], dtype=np.float32)
    c = np.array([1 + 2.0**-23], dtype=np.float32)
    in_fp64 = (a * b.astype(np.float64) + c).astype(np.float32)

    assert in_fp64.tolist() == [1 + 2.0**-22]
    assert multiply_add(a, b, c).tolist() == [1 + 2.0**-23]
    assert multiply_add(a, b, -c).tolist() == [-1 - 2.0**-23]
