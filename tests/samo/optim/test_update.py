"""The optimizer step over kept entries, against dense optimizers on masked tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_contract import RULES, layer_of, randoms, state_of
from support.oracle import RoundedAdamW, nearest_root
from torch import Tensor, nn

from axsparse.samo.index.base import FullIndex
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper, StateBlock
from axsparse.samo.optim.update import clip_factor, global_norm, norm_partials, update
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import StateFormat
from axsparse.samo.tensor_state import TensorState

RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
OURS = {case.name: case.optimizer for case in RULES}
"""The elementwise optimizers."""
THEIRS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(RoundedAdamW, betas=BETAS, eps=EPS),
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def mask_of(kept: int) -> Tensor:
    """`kept` entries of a tensor half as large again, at random."""
    mask = torch.zeros(kept + kept // 2 + 1, dtype=torch.bool)
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(kept))
    mask[order[:kept]] = True
    return mask


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
        *((name, kept) for name in OURS if name != "adamw" for kept in (1, BLOCK + 1)),
    ],
)
@pytest.mark.parametrize(("half", "decays"), [(False, True), (True, True), (False, False)])
def test_kept_entries_are_bitwise_those_of_a_masked_dense_run(
    name: str, kept: int, half: bool, decays: bool
) -> None:
    """The master equals an fp32 run's, and a half weight is the master rounded."""
    ours, mask, dtype = OURS[name], mask_of(kept), torch.bfloat16 if half else torch.float32
    layer, tensor = layer_of(mask, dtype, dtype, len(ours.moments))
    tensor.decays, start = decays, randoms(len(mask), 0)
    layer.optimizer_state.write_master(tensor, 0, start[mask])
    dense, decay = nn.Parameter(start * mask), DECAY if decays else 0.0
    how = {"lr": RATE, "weight_decay": decay, "foreach": False, "fused": False}
    optimizer = THEIRS[name]([dense], **how)

    for step in range(1, 4):
        gradient = randoms(len(mask), step).to(tensor.parameter.dtype)
        tensor.accumulated = False
        layer.accumulate(tensor, gradient)
        update([layer], ours, Hyper(step, RATE, BETAS, EPS, DECAY), 0.5)
        dense.grad = gradient.float() * mask * 0.5
        optimizer.step()
        with torch.no_grad():
            dense.mul_(mask)

    assert torch.equal(layer.master("w"), dense.detach()[mask])
    assert torch.equal(tensor.weight_D, round_to(dense.detach(), tensor.parameter.dtype))
    names = {"momentum": "momentum_buffer"}
    for moment, values in layer.optimizer_state.moments_of(tensor, 0, kept).items():
        assert torch.equal(values, optimizer.state[dense][names.get(moment, moment)][mask])


SIZES = {"small": 3, "edge": BLOCK, "large": 2 * BLOCK + 5}
examples = settings(max_examples=50, deadline=None, derandomize=True)


def layer_with_gradients(dtype: torch.dtype = torch.float32) -> LayerState:
    masks = {name: torch.ones(numel, dtype=torch.bool) for name, numel in SIZES.items()}
    layer = state_of(masks, StateFormat(torch.float32, dtype))
    generator = torch.Generator().manual_seed(1)
    for tensor in layer.tensors:
        layer.accumulate(tensor, torch.randn(tensor.kept, generator=generator))
    return layer


def exact_norm(gradient: Tensor) -> float:
    exact = math.sqrt(math.fsum(value * value for value in gradient.double().tolist()))
    return torch.tensor(exact, dtype=torch.float64).float().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_block_gives_one_partial_sum_of_squares(dtype: torch.dtype) -> None:
    layer = layer_with_gradients(dtype)

    partials = norm_partials([layer], SIZES)

    blocks = {name: len(values) for name, values in partials.items()}
    assert blocks == {"small": 1, "edge": 1, "large": 3}
    for name, values in partials.items():
        gradient = layer.gradient_of(layer.by_full_name[name]).double()
        for number, value in enumerate(values.tolist()):
            block = gradient[number * BLOCK : (number + 1) * BLOCK]
            assert value == pytest.approx(math.fsum(block.square().tolist()), rel=1e-14)
    assert global_norm(torch.cat(list(partials.values()))) == exact_norm(layer.gradient)


def test_only_tensors_that_are_named_and_first_uses_give_partials() -> None:
    assert list(norm_partials([layer_with_gradients()], ["edge", "elsewhere"])) == ["edge"]
    owner = TensorState("a", nn.Parameter(torch.zeros(4)), FullIndex(4), decays=False)
    alias = TensorState("b", owner.parameter, FullIndex(4), decays=False, alias_of=owner)
    layer = LayerState("layer", [owner, alias], StateFormat(torch.float32, torch.float32))

    assert list(norm_partials([layer], ["a", "b"])) == ["a"]


@pytest.mark.parametrize(
    ("value", "position"),
    [(math.inf, 0), (-math.inf, 2), (math.nan, BLOCK + 2), (math.inf, 3 * BLOCK + 7)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(
    value: float, position: int, dtype: torch.dtype
) -> None:
    layer = layer_with_gradients(dtype)
    layer.gradient[position] = value

    partials = torch.cat(list(norm_partials([layer], SIZES).values()))

    assert int((~torch.isfinite(partials)).sum()) == 1
    assert not math.isfinite(global_norm(partials))


@examples
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20),
    st.sampled_from([1e-3, 0.5, 1.0, 10.0, 1e4]),
)
def test_clipping_is_that_of_torch(values: list[float], clip_norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    norm = exact_norm(parameter.grad)
    ours = parameter.grad * clip_factor(norm, clip_norm)

    torch.nn.utils.clip_grad_norm_([parameter], clip_norm)

    # Torch computes its norm in fp32, so that two roundings lie between the factors.
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=1e-30)


def test_a_limit_of_zero_never_clips() -> None:
    assert clip_factor(1e9, 0.0) == 1.0


def test_finite_gradients_however_large_give_finite_partials() -> None:
    layer = layer_with_gradients()
    layer.gradient.fill_(torch.finfo(torch.float32).max)

    partials = torch.cat(list(norm_partials([layer], SIZES).values()))

    assert bool(torch.isfinite(partials).all())
