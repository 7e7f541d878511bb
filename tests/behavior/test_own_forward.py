"""Modules with a forward of their own, each beside plain torch, in a table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support import own_models
from support.exhaustive import by_default
from support.oracle import torch_losses
from support.own_models import images, noisy_images, square_loss, word_loss, words
from support.runs import assert_bitwise, summed_loss, tiny_config, train_in_process
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Model
from axsparse.models.own_forward import from_module

STEPS, BATCH, MICROBATCH = 4, 8, 2
LAYOUTS = [(1, 1), (2, 1), (1, 2)]
Loss = Callable[[Tensor, Tensor], Tensor]
MODULES: dict[str, tuple[type[nn.Module], Callable[[], ArrayDataset], Loss]] = {
    "Vit": (own_models.Vit, images, summed_loss),
    "Nested": (own_models.Nested, images, summed_loss),
    "Dit": (own_models.Dit, noisy_images, square_loss),
    "ResNet": (own_models.ResNet, images, summed_loss),
    "Stages": (own_models.Stages, images, summed_loss),
    "Residual": (own_models.Residual, images, summed_loss),
    "Probe": (own_models.Probe, images, summed_loss),
    "Gpt": (own_models.Gpt, words, word_loss),
    "TorchEncoder": (own_models.TorchEncoder, words, word_loss),
    "Windows": (own_models.Windows, images, summed_loss),
    "Mixture": (own_models.Mixture, words, word_loss),
    "Centred": (own_models.Centred, images, summed_loss),
    "Softened": (own_models.Softened, images, summed_loss),
}
USUAL = [("Vit", (1, 1)), ("Dit", (2, 1)), ("ResNet", (1, 2)), ("Gpt", (2, 1)), ("Mixture", (2, 1))]
USUAL += [("Probe", layout) for layout in LAYOUTS]
USUAL += [("Centred", (2, 1)), ("Softened", (1, 1))]


def settings(**sections: Any) -> Config:
    return tiny_config(
        batch={"global_batch_size": BATCH, "microbatch_size": MICROBATCH},
        optimizer={"learning_rate": 1e-3, "clip_norm": 0.5},
        schedule={"warmup_steps": 0, "decay": "constant"},
        train={"steps": STEPS, "check_layers": True},
        **{"pruning": {"sparsity": 0.0}, **sections},
    )


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODULES[name][0]()


def model_of(name: str, module: nn.Module) -> tuple[Model, ArrayDataset]:
    _, data, loss = MODULES[name]
    read = data()
    model = from_module(module, loss, lambda samples: read.read(np.arange(samples))[0])
    return replace(model, example=None), read


@lru_cache(maxsize=4)
def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last weights that train of the module in plain torch."""
    module, (_, data, loss) = made(name), MODULES[name]
    losses = list(torch_losses(module, loss, data(), settings()))
    trained = {name: each for name, each in module.named_parameters() if each.grad is not None}
    return losses, {name: each.detach() for name, each in trained.items()}


@pytest.mark.parametrize(("name", "layout"), by_default(USUAL, product(MODULES, LAYOUTS)))
def test_a_module_trains_as_in_plain_torch(name: str, layout: tuple[int, int]) -> None:
    module = made(name)
    before = copy.deepcopy(module.state_dict())
    model, data = model_of(name, module)
    losses, weights = plain(name)

    ranks = train_in_process(*layout, model, settings(), data)

    ours = {key: each for _, trace in ranks for key, each in trace.weights.items()}
    for second in {key for key in ours if key not in weights}:
        del ours[second]  # the second use of a tied weight
    assert ours.keys() == weights.keys()
    # Statistics of two samples divide by what differs by a rounding: the fourth loss by 2e-4 on
    # CPUs with AVX-512, where convolutions add in another order.
    most_of_loss, most_of_weight = (5e-4, 2e-4) if name == "ResNet" else (1e-5, 3e-5)
    for _, trace in ranks:
        assert trace.losses == pytest.approx(losses, rel=most_of_loss)
    for key, weight in ours.items():
        # Where a gradient is zero but for rounding, AdamW makes steps of any size of it.
        apart = (weight - weights[key]).abs()
        assert apart.mean() < most_of_weight and apart.max() < 2 * STEPS * 1e-3, key
    now = module.state_dict()
    assert all(torch.equal(tensor, now[key]) for key, tensor in before.items())


@pytest.mark.parametrize("name", by_default(["Dit", "Softened"], [*MODULES]))
def test_pruned_and_recomputed_in_stages_it_has_the_bits_of_one_stage(name: str) -> None:
    model, data = model_of(name, made(name))
    pruned = settings(pruning={"sparsity": 0.7})
    other = settings(pruning={"sparsity": 0.7}, pipeline={"checkpoint_activations": 1})
    [(_, one)] = train_in_process(1, 1, model, pruned, data)

    ranks = train_in_process(3, 1, model, other, data)

    assert any(len(one.kept[key]) < 0.31 * one.weights[key].numel() for key in one.kept)
    for _, trace in ranks:
        assert_bitwise(trace, one)
