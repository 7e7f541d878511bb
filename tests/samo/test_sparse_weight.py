"""Kept entries that are computed alone count as the gradient of their tensor."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.pruned import matrices
from support.runs import random_init
from support.sampled import by_gather, sample_all
from torch import Tensor, nn

from axsparse.models.layer import Layer
from axsparse.samo import gradient_hooks
from axsparse.samo.gradient_hooks import GradientCollector, SparseWeight
from axsparse.samo.host.sampled_product import FEWEST_TOKENS
from axsparse.samo.layer_construction import StateOptions, build_layers
from axsparse.samo.layer_state import LayerState

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
            dtype=dtype,
            gradient_dtype=gradient_dtype,
            moments=("exp_avg", "exp_avg_sq"),
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
        found = self.collector.sparse_weights(self.names)
        return {weight.tensor.name: weight for weight in found.values()}

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
    case.collector.begin()
    assert weight.accumulate(*factors(7))

    case.collector.begin()
    assert weight.accumulate(*factors(1))
    assert weight.accumulate(*factors(2))

    index = weight.tensor.index
    total = sum(by_gather(outer, rows, index).float() for rows, outer in map(factors, (1, 2)))
    assert torch.equal(case.first.gradient_of(weight.tensor), torch.as_tensor(total))
    assert case.collector.finish() == ["first.bias", "second.weight"]


def test_a_layer_is_ready_once_with_the_last_of_its_gradients() -> None:
    case = Case()
    weights = case.weights
    case.collector.begin()
    case.collector.microbatch(is_last=False)
    for weight in weights.values():
        assert weight.accumulate(*factors(1))
    assert case.ready == []

    case.collector.microbatch(is_last=True)
    assert weights["second.weight"].accumulate(*factors(2))
    assert case.ready == ["second"]
    assert weights["first.weight"].accumulate(*factors(2))
    assert case.ready == ["second"], "the bias is missing"
    bias = case.first.tensor("first.bias").parameter
    bias.float().sum().backward()

    assert case.ready == ["second", "first"]
    assert case.collector.finish() == []
    assert case.ready == ["second", "first"]


def test_growth_candidates_and_small_microbatches_want_whole_gradients() -> None:
    case = Case()
    weights = case.weights
    case.collector.harvest({"first.weight": 3})
    case.collector.begin()

    assert not weights["first.weight"].accumulate(*factors(1))
    assert weights["second.weight"].accumulate(*factors(1))
    assert not weights["second.weight"].accumulate(*factors(1, tokens=20))
    assert case.collector.finish() == ["first.weight", "first.bias"]

    case.collector.harvested()
    case.collector.begin()
    assert weights["first.weight"].accumulate(*factors(1))


def test_who_may_be_sampled() -> None:
    case = Case()
    assert list(case.weights) == ["first.weight", "second.weight"]
    assert list(case.collector.sparse_weights(["second.weight"])) == [
        case.layers[1].tensors[0].parameter
    ]

    case.first.tensor("first.weight").parameter.register_hook(lambda gradient: gradient)
    assert list(case.weights) == ["second.weight"]
    weight = case.layers[1].tensors[0].parameter
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert case.weights == {}


def test_a_sum_of_a_step_before_does_not_replace_what_is_sampled() -> None:
    """A tensor of which all was kept, and that a step's last microbatch did not use, is pruned: the
    next step samples its first microbatch and has a whole gradient of its second."""
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
    tensor.parameter.sum().backward()

    total = by_gather(outer, rows, tensor.index) + 1
    assert torch.equal(case.first.gradient_of(tensor), total)


def test_products_are_of_the_weight_s_type_and_of_many_tokens() -> None:
    weight = Case().weights["first.weight"]
    rows, bias = torch.zeros(FEWEST_TOKENS, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH)

    assert weight.takes(rows, None)
    assert weight.takes(rows, bias.to(torch.bfloat16))
    assert not weight.takes(rows[1:], None)
    assert not weight.takes(rows.float(), None)
    assert not weight.takes(rows, bias)
