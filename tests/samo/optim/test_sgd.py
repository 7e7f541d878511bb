"""SGD over kept entries, against its formula and `torch.optim.SGD` on a masked dense tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.optimizer import Block
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.optim.update import update
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK
from axsparse.samo.tensor_state import TensorState

RATE, DECAY = 0.01, 0.1
RULES = [(0.0, False), (0.9, False), (0.9, True)]
every_rule = pytest.mark.parametrize(("momentum", "nesterov"), RULES)


def hyper(step: int, decay: float = DECAY) -> Hyper:
    return Hyper(step, RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)


def random(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@every_rule
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_follows_its_formula(momentum: float, nesterov: bool, decay: float) -> None:
    rule = sgd(momentum, nesterov=nesterov)
    master = torch.tensor([1.5])
    moments = {name: torch.zeros(1) for name in rule.moments}
    theta, v = 1.5, 0.0

    for step, g in enumerate([0.5, -0.25, 2.0], start=1):
        block = Block(torch.tensor([g]), master, moments)
        rule.update_moments(block, hyper(step, decay))
        rule.apply(block, None, hyper(step, decay))
        d = g + decay * theta
        v = momentum * v + d
        theta -= RATE * (d + momentum * v if nesterov else v)

    assert master.item() == pytest.approx(theta, rel=1e-6)


def test_without_momentum_there_is_no_state() -> None:
    assert sgd(0.0, nesterov=False).moments == ()
    assert sgd(0.9, nesterov=False).moments == ("momentum",)


@every_rule
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("kept", [1, 1000, BLOCK + 1])
def test_kept_entries_are_bitwise_those_of_a_masked_dense_run(
    momentum: float, nesterov: bool, half: bool, decays: bool, kept: int
) -> None:
    rule = sgd(momentum, nesterov=nesterov)
    numel = kept + kept // 2 + 1
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[torch.randperm(numel, generator=torch.Generator().manual_seed(kept))[:kept]] = True
    weight = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16 if half else torch.float32))
    tensor = TensorState("w", weight, make_index(mask), decays)
    layer = LayerState(
        "layer", [tensor], StateTypes(weight.dtype, "fp32" if half else "weight", rule.moments)
    )
    layer.optimizer_state.write_master(tensor, 0, random(0, numel)[mask])
    dense = nn.Parameter(random(0, numel) * mask)
    optimizer = torch.optim.SGD(
        [dense],
        lr=RATE,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=DECAY if decays else 0.0,
        foreach=False,
        fused=False,
    )

    for step in range(1, 5):
        gradient = random(step, numel).to(weight.dtype)
        tensor.accumulated = False
        layer.accumulate(tensor, gradient)
        update([layer], rule, hyper(step), 0.5)
        dense.grad = gradient.float() * mask * 0.5
        optimizer.step()
        with torch.no_grad():
            dense.mul_(mask)

    assert torch.equal(layer.master("w"), dense.detach()[mask])
    assert torch.equal(tensor.weight_D, round_to(dense.detach(), weight.dtype))
    for values in layer.optimizer_state.moments_of(tensor, 0, kept).values():
        assert torch.equal(values, optimizer.state[dense]["momentum_buffer"][mask])
