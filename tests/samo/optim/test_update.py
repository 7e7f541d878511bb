"""The optimizer step over kept entries, against `torch.optim.AdamW` on a masked dense tensor."""

from __future__ import annotations

import pytest
import torch
from support.rounded_adamw import RoundedAdamW
from torch import Tensor, nn

from axsparse.samo.index.base import FullIndex, make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.optimizer import Block, Optimizer
from axsparse.samo.optim.update import update
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK
from axsparse.samo.tensor_state import TensorState

EDGES = [1, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1]
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def hyper(step: int) -> Hyper:
    return Hyper(step, RATE, BETAS, EPS, DECAY)


def random(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def mask_of(kept: int) -> Tensor:
    """`kept` entries of a tensor half as large again, at random."""
    mask = torch.zeros(kept + kept // 2 + 1, dtype=torch.bool)
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(kept))
    mask[order[:kept]] = True
    return mask


def one_tensor_layer(
    mask: Tensor | None, numel: int, *, half: bool, decays: bool = True, moments: tuple[str, ...]
) -> tuple[LayerState, TensorState]:
    weight = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16 if half else torch.float32))
    index = FullIndex(numel) if mask is None else make_index(mask)
    tensor = TensorState("w", weight, index, decays)
    layer = LayerState(
        "layer", [tensor], StateTypes(weight.dtype, "fp32" if half else "weight", moments)
    )
    layer.optimizer_state.write_master(
        tensor, 0, tensor.index.gather(random(0, numel), 0, tensor.kept)
    )
    return layer, tensor


def reference(weight: Tensor, *, decays: bool = True) -> tuple[nn.Parameter, torch.optim.AdamW]:
    parameter = nn.Parameter(weight.clone())
    optimizer = RoundedAdamW(
        [parameter],
        lr=RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY if decays else 0.0,
        foreach=False,
        fused=False,
    )
    return parameter, optimizer


def step_once(layer: LayerState, tensor: TensorState, gradient: Tensor, step: int) -> None:
    tensor.accumulated = False
    layer.accumulate(tensor, gradient)
    update([layer], ADAMW, hyper(step), 0.5)


@pytest.mark.parametrize("kept", EDGES)
def test_in_fp32_kept_entries_are_bitwise_those_of_a_masked_dense_run(kept: int) -> None:
    mask = mask_of(kept)
    layer, tensor = one_tensor_layer(mask, mask.numel(), half=False, moments=ADAMW.moments)
    dense, optimizer = reference(random(0, mask.numel()) * mask)

    for step in range(1, 4):
        gradient = random(step, mask.numel())
        step_once(layer, tensor, gradient, step)
        dense.grad = gradient * mask * 0.5
        optimizer.step()
        with torch.no_grad():
            dense.mul_(mask)

    assert torch.equal(tensor.weight_D, dense)
    for name, values in layer.optimizer_state.moments_of(tensor, 0, kept).items():
        assert torch.equal(values, optimizer.state[dense][name][mask])


@pytest.mark.parametrize("kept", EDGES)
def test_in_bf16_the_weight_is_the_master_rounded_and_the_master_is_an_fp32_run(kept: int) -> None:
    mask = mask_of(kept)
    layer, tensor = one_tensor_layer(mask, mask.numel(), half=True, moments=ADAMW.moments)
    dense, optimizer = reference(random(0, mask.numel()) * mask)

    for step in range(1, 4):
        gradient = random(step, mask.numel()).bfloat16()
        step_once(layer, tensor, gradient, step)
        dense.grad = gradient.float() * mask * 0.5
        optimizer.step()
        with torch.no_grad():
            dense.mul_(mask)

    assert torch.equal(layer.master("w"), dense.detach()[mask])
    assert torch.equal(tensor.weight_D, round_to(dense, torch.bfloat16))


def test_weight_decay_spares_tensors_that_do_not_decay() -> None:
    layer, tensor = one_tensor_layer(None, 50, half=False, decays=False, moments=ADAMW.moments)
    dense, optimizer = reference(random(0, 50), decays=False)

    step_once(layer, tensor, random(1, 50), 1)
    dense.grad = random(1, 50) * 0.5
    optimizer.step()

    assert torch.equal(tensor.weight_D, dense)


def test_the_second_use_of_a_weight_is_not_updated_a_second_time() -> None:
    owner = TensorState("a", nn.Parameter(random(0, 20)), FullIndex(20), decays=False)
    shared = nn.Parameter(owner.parameter.detach())
    alias = TensorState("b", shared, FullIndex(20), decays=False, alias_of=owner)
    layer = LayerState("layer", [owner, alias], StateTypes(torch.float32, "weight", ADAMW.moments))
    dense, optimizer = reference(random(0, 20), decays=False)
    layer.accumulate(owner, random(1, 20))
    layer.accumulate(alias, random(2, 20))

    update([layer], ADAMW, hyper(1), 1.0)
    dense.grad = random(1, 20)
    optimizer.step()

    assert torch.equal(owner.weight_D, dense)


def test_statistics_reach_the_rule_summed_over_all_blocks_of_a_tensor() -> None:
    seen: list[tuple[int, float]] = []

    def update_moments(block: Block, hyper: Hyper) -> None:
        block.moments["velocity"].add_(block.grad)

    def statistics(block: Block, hyper: Hyper) -> Tensor:
        return torch.stack([block.master.double().sum(), block.moments["velocity"].double().sum()])

    def apply(block: Block, sums: Tensor | None, hyper: Hyper) -> None:
        assert sums is not None
        seen.append((block.master.numel(), float(sums[0] - sums[1])))
        block.master.sub_(block.moments["velocity"]).sub_(block.grad)

    rule = Optimizer(("velocity",), update_moments, statistics, apply, num_statistics=2)
    kept = 2 * BLOCK + 7
    mask = mask_of(kept)
    layer, tensor = one_tensor_layer(mask, mask.numel(), half=False, moments=rule.moments)
    layer.optimizer_state.write_master(tensor, 0, torch.full((kept,), 2.0))
    layer.accumulate(tensor, torch.ones(mask.numel()))

    update([layer], rule, hyper(1), 0.5)

    assert seen == [(BLOCK, 1.5 * kept), (BLOCK, 1.5 * kept), (7, 1.5 * kept)]
    assert torch.equal(tensor.weight_D, mask * 1.0)
