"""The optimizer step over kept entries, against dense optimizers on masked tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.dense_optimizers import RoundedAdamW, nearest_root
from torch import Tensor, nn

from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper, Optimizer, StateBlock
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.optim.update import update
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK
from axsparse.samo.tensor_state import TensorState

RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
Dense = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Rule:
    """An elementwise optimizer, torch's own, and one step of its formula in plain numbers."""

    ours: Optimizer
    dense: Dense
    formula: Callable[[float, float, list[float], Hyper], float]
    """`(theta, gradient, moments, hyper)` moves the moments and returns the new theta."""


def adamw_formula(theta: float, g: float, moments: list[float], hyper: Hyper) -> float:
    (beta1, beta2), rate = hyper.betas, hyper.learning_rate
    moments[0] = beta1 * moments[0] + (1 - beta1) * g
    moments[1] = beta2 * moments[1] + (1 - beta2) * g * g
    m, v = moments[0] / (1 - beta1**hyper.step), moments[1] / (1 - beta2**hyper.step)
    return theta * (1 - rate * hyper.weight_decay) - rate * m / (math.sqrt(v) + hyper.eps)


def sgd_rule(momentum: float, *, nesterov: bool) -> Rule:
    def formula(theta: float, g: float, moments: list[float], hyper: Hyper) -> float:
        d = g + hyper.weight_decay * theta
        v = momentum * moments[0] + d if momentum else d
        moments[:1] = [v] if momentum else []
        return theta - hyper.learning_rate * (d + momentum * v if nesterov else v)

    dense = partial(torch.optim.SGD, momentum=momentum, nesterov=nesterov)
    return Rule(sgd(momentum, nesterov=nesterov), dense, formula)


RULES = {
    "adamw": Rule(ADAMW, partial(RoundedAdamW, betas=BETAS, eps=EPS), adamw_formula),
    "sgd": sgd_rule(0.0, nesterov=False),
    "momentum": sgd_rule(0.9, nesterov=False),
    "nesterov": sgd_rule(0.9, nesterov=True),
}


def hyper(step: int, decay: float = DECAY) -> Hyper:
    return Hyper(step, RATE, BETAS, EPS, decay)


def random(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def mask_of(kept: int) -> Tensor:
    """`kept` entries of a tensor half as large again, at random."""
    mask = torch.zeros(kept + kept // 2 + 1, dtype=torch.bool)
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(kept))
    mask[order[:kept]] = True
    return mask


def one_tensor_layer(
    mask: Tensor, rule: Optimizer, *, half: bool = False, decays: bool = True
) -> tuple[LayerState, TensorState]:
    weight = nn.Parameter(torch.zeros(len(mask), dtype=torch.bfloat16 if half else torch.float32))
    tensor = TensorState("w", weight, make_index(mask), decays)
    types = StateTypes(weight.dtype, weight.dtype, rule.moments)
    layer = LayerState("layer", [tensor], types)
    layer.optimizer_state.write_master(tensor, 0, random(0, len(mask))[mask])
    return layer, tensor


def dense_of(
    rule: Rule, weight: Tensor, decay: float
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(weight.clone())
    return parameter, rule.dense(
        [parameter], lr=RATE, weight_decay=decay, foreach=False, fused=False
    )


def test_square_roots_are_the_nearest_numbers() -> None:
    """After very many steps without ε, a zero moves to minus the quotient of its moments."""
    square = torch.rand(4099, generator=torch.Generator().manual_seed(0)).add_(0.1).pow_(9)
    moments = {"exp_avg": torch.ones(4099), "exp_avg_sq": square.clone()}
    block = StateBlock(torch.zeros(4099), torch.zeros(4099), moments)

    ADAMW.apply(block, None, Hyper(10**6, 1.0, BETAS, 0.0, 0.0))

    assert torch.equal(block.master, -1 / nearest_root(square))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *(("adamw", kept) for kept in (1, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1)),
        *((name, kept) for name in RULES if name != "adamw" for kept in (1, BLOCK + 1)),
    ],
)
@pytest.mark.parametrize(("half", "decays"), [(False, True), (True, True), (False, False)])
def test_kept_entries_are_bitwise_those_of_a_masked_dense_run(
    name: str, kept: int, half: bool, decays: bool
) -> None:
    """The master equals an fp32 run's, and a half weight is the master rounded."""
    rule, mask = RULES[name], mask_of(kept)
    layer, tensor = one_tensor_layer(mask, rule.ours, half=half, decays=decays)
    start = random(0, len(mask)) * mask
    dense, optimizer = dense_of(rule, start, DECAY if decays else 0.0)

    for step in range(1, 4):
        gradient = random(step, len(mask)).to(tensor.parameter.dtype)
        tensor.accumulated = False
        layer.accumulate(tensor, gradient)
        update([layer], rule.ours, hyper(step), 0.5)
        dense.grad = gradient.float() * mask * 0.5
        optimizer.step()
        with torch.no_grad():
            dense.mul_(mask)

    assert torch.equal(layer.master("w"), dense.detach()[mask])
    assert torch.equal(tensor.weight_D, round_to(dense.detach(), tensor.parameter.dtype))
    names = {"momentum": "momentum_buffer"}
    for moment, values in layer.optimizer_state.moments_of(tensor, 0, kept).items():
        assert torch.equal(values, optimizer.state[dense][names.get(moment, moment)][mask])
