"""LAMB over kept entries, against the paper's algorithm on a masked dense tensor."""

from __future__ import annotations

import pytest
import torch
from support.kernel_contract import BF16, FP32, layer_of, randoms
from support.oracle import DenseLamb
from torch import Tensor, nn

from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.lamb import LAMB
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.shards import BLOCK

RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-6, 0.1
TOLERANCE = 1e-5
"""The dense run is fp64; a step of ours rounds to fp32 some ten times, by 6e-8 each."""


def started(mask: Tensor, start: Tensor, dtype: torch.dtype = FP32) -> LayerState:
    layer, tensor = layer_of(mask, dtype, dtype, len(LAMB.moments))
    layer.optimizer_state.write_master(tensor, 0, start[mask])
    return layer


def step(layer: LayerState, gradient: Tensor, number: int = 1) -> None:
    layer.begin_step()
    layer.accumulate(layer.tensors[0], gradient)
    update([layer], LAMB, Hyper(number, RATE, BETAS, EPS, DECAY), 0.5)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("numel", [1000, 2 * BLOCK, 3 * BLOCK + 17])
def test_kept_entries_follow_the_papers_algorithm(numel: int, dtype: torch.dtype) -> None:
    """Half of the tensor is kept: less than a block, one block, and more."""
    mask, start = randoms(numel, 9) > 0, randoms(numel, 1)
    layer, dense = started(mask, start, dtype), nn.Parameter(start * mask)
    optimizer = DenseLamb([{"params": [dense], "weight_decay": DECAY}], RATE, BETAS, EPS)

    for number in range(1, 5):
        gradient = randoms(numel, number + 1, dtype)
        step(layer, gradient, number)
        dense.grad = gradient.float() * mask * 0.5
        optimizer.step()

    expected = dense.detach()
    error = (layer.master("w") - expected[mask]).abs().max()
    assert float(error) <= TOLERANCE * float(expected.abs().max())
    assert not layer.tensors[0].weight_D[~mask].any()


def test_a_step_of_length_zero_moves_nothing() -> None:
    layer = started(torch.ones(50, dtype=torch.bool), randoms(50, 1))
    layer.tensors[0].decays = False

    step(layer, torch.zeros(50))

    assert torch.equal(layer.master("w"), randoms(50, 1))


def test_a_tensor_of_zeros_moves_by_the_step_itself() -> None:
    layer, gradient = started(torch.ones(50, dtype=torch.bool), torch.zeros(50)), randoms(50, 2)

    step(layer, gradient)

    # The first bias-corrected step of an entry is the sign of its gradient.
    torch.testing.assert_close(layer.master("w"), -RATE * gradient.sign(), rtol=1e-3, atol=0)
