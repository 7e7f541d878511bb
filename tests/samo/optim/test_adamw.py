"""The recurrence of AdamW on explicit moments, against its formula in plain numbers."""

from __future__ import annotations

import math

import pytest
import torch
from support.rounded_adamw import nearest_root

from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.optimizer import Block


def test_adamw_follows_its_formula() -> None:
    beta1, beta2, rate, decay, eps = 0.9, 0.95, 0.01, 0.1, 1e-8
    gradients = [0.5, -0.25, 2.0]
    master = torch.tensor([1.5])
    moments = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    theta, m, v = 1.5, 0.0, 0.0

    for step, g in enumerate(gradients, start=1):
        hyper = Hyper(step, rate, (beta1, beta2), eps, decay)
        block = Block(torch.tensor([g]), master, moments)
        ADAMW.update_moments(block, hyper)
        ADAMW.apply(block, None, hyper)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        unbiased = m / (1 - beta1**step), v / (1 - beta2**step)
        theta = theta * (1 - rate * decay) - rate * unbiased[0] / (math.sqrt(unbiased[1]) + eps)

    assert moments["exp_avg"].item() == pytest.approx(m, rel=1e-6)
    assert moments["exp_avg_sq"].item() == pytest.approx(v, rel=1e-6)
    assert master.item() == pytest.approx(theta, rel=1e-6)


def test_square_roots_are_the_nearest_numbers() -> None:
    """After very many steps without ε, a zero moves to minus the quotient of its moments."""
    square = torch.rand(4099, generator=torch.Generator().manual_seed(0)).add_(0.1).pow_(9)
    moments = {"exp_avg": torch.ones(4099), "exp_avg_sq": square.clone()}
    block = Block(torch.zeros(4099), torch.zeros(4099), moments)

    ADAMW.apply(block, None, Hyper(10**6, 1.0, (0.9, 0.95), 0.0, 0.0))

    assert torch.equal(block.master, -1 / nearest_root(square))


def test_adamw_moves_elementwise_and_keeps_two_moments() -> None:
    assert ADAMW.moments == ("exp_avg", "exp_avg_sq")
    assert ADAMW.statistics is None
