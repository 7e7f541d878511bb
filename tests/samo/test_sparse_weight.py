"""Kept entries that are computed alone count as the gradient of their tensor."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.runs import matrices, random_init
from support.sums import by_gather, sample_all
from torch import Tensor, nn

from axsparse.models.layer import Layer
from axsparse.samo import gradient_hooks
from axsparse.samo.gradient_hooks import GradientCollector, SparseWeight
from axsparse.samo.host.sparse_products import FEWEST_TOKENS
from axsparse.samo.layer_construction import StateOptions, build_layers
from axsparse.samo.layer_state import LayerState, StateTypes

WIDTH, TOKENS = 8, 200


class Case:
    """Two layers, one with a bias, and the collector of their gradients."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        gradient_dtype: torch.dtype = torch.float32,
        sparsity: float = 0.9,
    ) -> None:
        specs = [
            Layer("first", lambda: nn.Linear(WIDTH, WIDTH), init=random_init),
            Layer("second", lambda: nn.Linear(WIDTH, WIDTH, bias=False), init=random_init),
        ]
        options = StateOptions(
            StateTypes(dtype, gradient_dtype, ("exp_avg", "exp_avg_sq")),
            seed=1,
            masks=matrices(specs, sparsity),
        )
        self.layers = [layer.state for layer in build_layers(specs, {}, options)]
        self.ready: list[str] = []
        self.collector = GradientCollector(
            self.layers, lambda layer: self.ready.append(layer.name), lambda _: nullcontext()
        )
        self.names = [tensor.name for layer in self.layers for tensor in layer.tensors]

    @property
    def weights(self) -> dict[str, SparseWeight]:
        self.collector.allow_sparse_products(self.names)
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        found = [self.collector.sparse_products(tensor.parameter) for tensor in tensors]
        return {weight.tensor.name: weight for weight in found if weight is not None}

    @property
    def first(self) -> LayerState:
        return self.layers[0]


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample what is small, and by any processor."""
    sample_all(monkeypatch)
    monkeypatch.setattr(gradient_hooks, "FEWEST_TOKENS", FEWEST_TOKENS)


def factors(seed: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, tokens, WIDTH, generator=generator).to(torch.bfloat16)
    return drawn[0], drawn[1]


def test_the_first_product_of_a_step_replaces_and_later_ones_add() -> None:
    case = Case()
    weight = case.weights["first.weight"]
    parameter = weight.tensor.parameter
    case.collector.begin()
    assert weight.accumulate(*factors(7))
    case.collector.complete(parameter)

    case.collector.begin()
    for seed in (1, 2):
        assert weight.accumulate(*factors(seed))
        case.collector.complete(parameter)

    index = weight.tensor.index
    total = sum(by_gather(outer, rows, index).float() for rows, outer in map(factors, (1, 2)))
    assert torch.equal(case.first.gradient_of(weight.tensor), torch.as_tensor(total))
    assert case.collector.finish() == ["first.bias", "second.weight"]


def test_the_parts_of_a_microbatch_s_gradient_are_added_first() -> None:
    """And rounded, as in a dense gradient."""
    case = Case()
    weight = case.weights["first.weight"]
    parameter = weight.tensor.parameter
    case.collector.begin()
    for microbatch in range(2):
        assert weight.accumulate(*factors(microbatch))
        case.collector.add(parameter, torch.ones_like(parameter))
        assert weight.accumulate(*factors(microbatch + 2))
        case.collector.complete(parameter)

    def part(seed: int) -> Tensor:
        rows, outer = factors(seed)
        return by_gather(outer, rows, weight.tensor.index)

    total = ((part(0) + 1) + part(2)).float() + ((part(1) + 1) + part(3)).float()
    assert torch.equal(case.first.gradient_of(weight.tensor), total)


def test_a_layer_is_ready_once_with_the_last_of_its_gradients() -> None:
    case = Case()
    weights = case.weights
    case.collector.begin()
    case.collector.microbatch(is_last=False)
    for weight in weights.values():
        assert weight.accumulate(*factors(1))
        case.collector.complete(weight.tensor.parameter)
    assert case.ready == []

    case.collector.microbatch(is_last=True)
    assert weights["second.weight"].accumulate(*factors(2))
    assert case.ready == [], "there may be another gradient"
    case.collector.complete(weights["second.weight"].tensor.parameter)
    assert case.ready == ["second"]
    case.collector.complete(weights["first.weight"].tensor.parameter)
    assert case.ready == ["second"], "the bias is missing"
    bias = case.first.tensor("first.bias").parameter
    bias.float().sum().backward()

    assert case.ready == ["second", "first"]
    assert case.collector.finish() == []
    assert case.ready == ["second", "first"]


def test_what_is_deferred_is_left_alone() -> None:
    case = Case(sparsity=0, gradient_dtype=torch.bfloat16)
    tensor = case.first.tensor("first.weight")
    answers = [True, False, False]
    case.collector.defer([tensor.parameter], lambda _: answers.pop(0))
    case.collector.begin()
    case.collector.microbatch(is_last=False)
    tensor.parameter.sum().backward()
    deferred = tensor.parameter.grad
    assert deferred is not None
    assert tensor.name in case.collector.finish()

    case.collector.begin()
    tensor.parameter.sum().backward()
    assert tensor.parameter.grad is None, "autograd would add before what is deferred is added"


def test_a_sum_of_a_step_before_does_not_replace_what_is_sampled() -> None:
    """A tensor of which all was kept, and that a step's last microbatch did not use, is pruned: the
    next step samples its first microbatch and has a full gradient of its second."""
    case = Case(dtype=torch.bfloat16, gradient_dtype=torch.bfloat16, sparsity=0)
    tensor = case.first.tensor("first.weight")
    case.collector.begin()
    case.collector.microbatch(is_last=False)
    tensor.parameter.sum().backward()
    assert tensor.parameter.grad is not None
    case.collector.microbatch(is_last=True)
    case.collector.finish()
    mask = torch.arange(WIDTH * WIDTH) % 10 == 0
    case.first.remask("first.weight", mask)

    case.collector.begin()
    rows, outer = factors(1)
    assert case.weights["first.weight"].accumulate(rows, outer)
    case.collector.complete(tensor.parameter)
    tensor.parameter.sum().backward()

    total = by_gather(outer, rows, tensor.index) + 1
    assert torch.equal(case.first.gradient_of(tensor), total)


def test_products_are_of_named_weights_of_their_type_and_of_many_tokens() -> None:
    case = Case()
    case.collector.allow_sparse_products(["second.weight"])
    allowed = [case.collector.sparse_products(each.tensors[0].parameter) for each in case.layers]
    assert [weight is not None for weight in allowed] == [False, True]
    weight = case.weights["first.weight"]
    rows, bias = torch.zeros(FEWEST_TOKENS, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH)

    assert weight.takes(rows, None)
    assert weight.takes(rows, bias.to(torch.bfloat16))
    assert not weight.takes(rows[1:], None)
    assert not weight.takes(rows.float(), None)
    assert not weight.takes(rows, bias)
