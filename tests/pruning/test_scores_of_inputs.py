"""A score of the user's own may see the inputs of layers: Wanda from outside, against torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.runs import (
    mlp,
    random_init,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Layer, Model
from axsparse.training.trainer import Trainer

SAMPLES = 7


def by_inputs(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    del name
    assert inputs.shape == weight.shape[1:] and inputs.dtype == torch.float32
    return weight.abs() * inputs


def config_of(**pruning: Any) -> Config:
    return tiny_config(
        pruning={"method": "custom", "sparsity": 0.7, "calibration_samples": SAMPLES, **pruning},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 3},
    )


def kept_by(
    layout: tuple[int, int], config: Config, model: Model, data: Dataset, **own: Any
) -> dict[str, Tensor]:
    """The positions of the kept entries, the same on all replicas."""
    kept: dict[str, Tensor] = {}
    for _, trace in train_in_process(*layout, model, config, data, **own):
        for name, positions in trace.kept.items():
            assert torch.equal(kept.setdefault(name, positions), positions), name
    return kept


def dense_modules(config: Config) -> list[tuple[str, nn.Module]]:
    """The layers of `mlp` with the weights that a run of this configuration starts from."""
    started: list[tuple[str, nn.Module]] = []

    def note(trainer: Trainer) -> None:
        for layer in trainer.layers:
            module = layer.spec.build()
            module.load_state_dict(layer.module.state_dict())
            started.append((layer.spec.name, module))

    dense = config.model_copy(update={"samo": config.samo.model_copy(update={"enabled": False})})
    train_in_process(1, 1, mlp(), dense, vector_data(), before=note, score=by_inputs)
    return started


def input_of(inner: nn.Module, module: nn.Module, inputs: Tensor) -> Tensor:
    """The input of a module within another when the outer one is called."""
    seen: list[Tensor] = []
    hook = inner.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    module(inputs)
    hook.remove()
    return seen[0]


@torch.no_grad()
def kept_in_torch(
    modules: Sequence[tuple[str, nn.Module]], config: Config, counts: dict[str, int]
) -> dict[str, Tensor]:
    """Layer by layer, each on what the pruned layers before it return: so many of the entries with
    the largest |weight| × norm of the input stay."""
    data, kept = vector_data(), {}
    samples = samples_of_step(len(data), SAMPLES, 0, config.seed)
    [flow], _ = data.read(samples)
    for name, module in modules:
        for path, linear in module.named_modules():
            weight = f"{name}.{path}.weight"
            if isinstance(linear, nn.Linear) and weight in counts:
                score = (linear.weight.abs() * input_of(linear, module, flow).norm(dim=0)).flatten()
                positions = score.argsort(descending=True)[: counts[weight]]
                mask = torch.zeros_like(score).index_fill_(0, positions, 1)
                linear.weight.mul_(mask.view_as(linear.weight))
                kept[weight] = positions.sort().values
        flow = module(flow)
    return kept


@pytest.mark.parametrize(
    ("layout", "pruning"),
    [
        ((1, 1), {}),
        ((2, 1), {}),
        ((1, 2), {}),
        ((2, 1), {"distribution": "erk", "layers": ["hidden0.*=0.25"]}),
    ],
)
def test_a_score_of_inputs_draws_the_masks_of_its_formula_in_every_layout(
    layout: tuple[int, int], pruning: dict[str, Any]
) -> None:
    config = config_of(**pruning)
    plain = kept_by((1, 1), config_of(method="magnitude", **pruning), mlp(), vector_data())

    found = kept_by(layout, config, mlp(), vector_data(), score=by_inputs)

    counts = {name: len(kept) for name, kept in plain.items() if name.endswith("0.weight")}
    expected = kept_in_torch(dense_modules(config), config, counts)
    assert len(expected) == 3
    assert all(torch.equal(found[name], kept) for name, kept in expected.items())
    assert not all(torch.equal(plain[name], kept) for name, kept in expected.items())


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_with_a_pattern_wanda_from_outside_is_wanda(layout: tuple[int, int]) -> None:
    config = config_of(pattern="2:4")
    wanda = config_of(method="wanda", pattern="2:4")

    own = kept_by(layout, config, tiny_gpt(config), token_data(), score=by_inputs)

    theirs = kept_by(layout, wanda, tiny_gpt(wanda), token_data())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)


def convolutions() -> Model:
    """Two layers, whose weights lie within them."""

    def first() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())

    def second() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, stride=2), nn.Flatten())

    layers = [Layer("first", first, init=random_init), Layer("second", second, init=random_init)]
    head = Layer("out", lambda: nn.Linear(6, 5), kind="head", init=random_init)
    return Model([*layers, head], mlp().loss)


def by_patches(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    del name
    return weight.abs() * inputs


@torch.no_grad()
def test_a_score_of_the_inputs_of_convolutions_draws_the_masks_of_its_formula() -> None:
    config, data = config_of(), vector_data()
    started: dict[str, nn.Module] = {}

    def note(trainer: Trainer) -> None:
        for layer in trainer.layers:
            started[layer.spec.name] = module = layer.spec.build()
            module.load_state_dict(layer.module.state_dict())

    dense = config.model_copy(update={"samo": config.samo.model_copy(update={"enabled": False})})
    with torch.enable_grad():
        train_in_process(1, 1, convolutions(), dense, data, before=note, score=by_patches)
        found = [
            kept_by(layout, config, convolutions(), data, score=by_patches)
            for layout in ((1, 1), (3, 1), (1, 2))
        ]

    assert all(len(kept["first.1.weight"]) < 36 for kept in found)
    [flow], _ = data.read(samples_of_step(len(data), SAMPLES, 0, config.seed))
    for layer, path in (("first", "1"), ("second", "0")):
        module = started[layer]
        convolution: Any = module.get_submodule(path)
        given = input_of(convolution, module, flow)
        with torch.enable_grad():
            output = convolution._conv_forward(given.square(), convolution.weight, None).sum()
            [squares] = torch.autograd.grad(output, convolution.weight)
        score = (convolution.weight.abs() * squares.sqrt()).flatten()
        for kept in found:
            positions = kept[f"{layer}.{path}.weight"]
            expected = score.argsort(descending=True)[: len(positions)].sort().values
            assert torch.equal(positions, expected), layer
        mask = torch.zeros_like(score).index_fill_(0, expected, 1)
        convolution.weight.mul_(mask.view_as(convolution.weight))
        flow = module(flow)
