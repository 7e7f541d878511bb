"""The kernels' own source, run thread by thread on this processor, and its contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda_on_cpu import EVERY, EmulatedLauncher, compiler
from support.kernel_contract import CONTRACT
from support.kernel_machine import RULES, Case, Machine, Promise, by_numpy, fresh_layer, random_mask
from support.kernel_reference import multiply_add

from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update

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


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch multiplies and adds with two roundings on this processor",
)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_torch_rounds_as_the_reference_does(rule: Case, beta1: float) -> None:
    mask = random_mask(20_000, 0.5)
    ours, theirs = (
        fresh_layer(mask, (torch.bfloat16,) * 2 + ("fp32",), rule.moments) for _ in "12"
    )

    for step in (1, 2, 3):
        hyper = Hyper(step, 0.01, (beta1, 0.95), 1e-8, 0.1)
        gradient = torch.randn(ours.gradient.numel(), generator=torch.Generator().manual_seed(step))
        for layer in (ours, theirs):
            layer.gradient.copy_(gradient)
        by_numpy(ours, rule, hyper, 0.37)
        update([theirs], rule.torch, hyper, 0.37)

    assert ours.optimizer_state.master_K is not None and theirs.optimizer_state.master_K is not None
    assert torch.equal(ours.optimizer_state.master_K, theirs.optimizer_state.master_K)
    for name, values in ours.optimizer_state.moments_K.items():
        assert torch.equal(values, theirs.optimizer_state.moments_K[name])
    assert torch.equal(ours.tensors[0].weight_D, theirs.tensors[0].weight_D)


def test_multiply_add_rounds_once() -> None:
    """Just below halfway, where fp64 sees halfway and would round up to even."""
    a, b = np.float32(2**16 - 1), np.array([(2**16 + 1) * 2.0**-56], dtype=np.float32)
    c = np.array([1 + 2.0**-23], dtype=np.float32)
    in_fp64 = (a * b.astype(np.float64) + c).astype(np.float32)

    assert in_fp64.tolist() == [1 + 2.0**-22]
    assert multiply_add(a, b, c).tolist() == [1 + 2.0**-23]
    assert multiply_add(a, b, -c).tolist() == [-1 - 2.0**-23]
