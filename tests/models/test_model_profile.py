"""The contents of a model, and every way in which its declaration can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from support.mpirun import run_fresh
from support.runs import random_init
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model, Tie
from axsparse.models.model_profile import profile


def linear(inputs: int = 3, outputs: int = 4, *, frozen: bool = False) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, bias=False).requires_grad_(not frozen)


def model(*layers: Layer, ties: Sequence[Tie] = ()) -> Model:
    return Model(layers, loss=lambda output, target: output.sum(), ties=ties)


def layer(name: str, build: Callable[[], nn.Module] | None = None) -> Layer:
    return Layer(name, build or linear(), init=random_init)


# -- what is found --------------------------------------------------------------------------


def test_parameters_have_global_names_shapes_and_say_whether_they_are_trained() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 4)
            self.one.bias.requires_grad_(False)

    (found,) = profile(model(Layer("a", Mixed, kind="head"))).layers

    assert (found.name, found.kind, found.numel) == ("a", "head", 16)
    assert [(p.name, p.shape, p.trained, p.numel) for p in found.parameters] == [
        ("a.one.weight", (4, 3), True, 12),
        ("a.one.bias", (4,), False, 4),
    ]


def test_attributes_of_a_users_module_say_nothing_about_its_matrices() -> None:
    class Owned(nn.Conv1d):
        def __init__(self) -> None:
            super().__init__(3, 4, 5)
            self.input_dim, self.multiplies = (4, 8), 0

    owned, plain = (
        profile(model(Layer("a", build))).layers[0].parameters
        for build in (Owned, lambda: nn.Conv1d(3, 4, 5))
    )

    assert owned == plain


def test_buffers_have_global_names_shapes_types_and_say_whether_they_are_state() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("cache", torch.zeros(2, 3, dtype=torch.bool), persistent=False)
            self.register_buffer("nothing", None)

    (found,) = profile(model(Layer("a", Buffered))).layers

    assert [(b.name, b.shape, b.dtype, b.persists, b.nbytes) for b in found.buffers] == [
        ("a.cache", (2, 3), torch.bool, False, 6),
        ("a.norm.running_mean", (6,), torch.float32, True, 24),
        ("a.norm.running_var", (6,), torch.float32, True, 24),
        ("a.norm.num_batches_tracked", (), torch.int64, True, 8),
    ]
    assert found.buffer_bytes == 62
    assert found.numel == 12


def test_a_tied_weight_counts_once() -> None:
    found = profile(
        model(
            layer("a"),
            layer("b", linear(frozen=True)),
            layer("c"),
            ties=[Tie("a.weight", "c.weight")],
        )
    )

    assert found.ties == {"c.weight": "a.weight"}
    assert found.num_params == 24
    assert found.counted == ["a.weight"]


def test_a_survey_costs_no_memory_and_no_random_numbers() -> None:
    devices = []

    def build() -> nn.Module:
        module = nn.Linear(200_000, 200_000)
        devices.append(module.weight.device.type)
        return module

    before = torch.get_rng_state()
    found = profile(model(Layer("huge", build)))

    assert found.num_params == 200_000 * 200_001
    assert devices == ["meta"]
    assert torch.equal(before, torch.get_rng_state())


class ReadsItself(nn.Module):
    """Cannot be built on the meta device, since it reads its values; also draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))
        self.largest = float(self.weight.max())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_layer_that_cannot_be_built_without_memory_is_built_and_thrown_away() -> None:
    before = torch.get_rng_state()

    found = profile(model(Layer("a", ReadsItself)))

    assert found.num_params == 5
    assert torch.equal(before, torch.get_rng_state())


LOOKS = """
import sys
from dataclasses import replace
from torch import nn
from axsparse.config.load import configure
from axsparse.models.layer import Layer, Model
from axsparse.models.zoo.model_registry import named_model
from axsparse.models.model_profile import profile

class Drawn(nn.Embedding):
    def __init__(self):
        super().__init__(3, 4)
        nn.init.xavier_normal_(self.weight)
        nn.init.kaiming_normal_(self.weight)
        self.weight.data.normal_()

profile(replace(named_model(configure(None)), example=None))
profile(Model([Layer("a", Drawn)], loss=lambda output, target: output.sum()))
print("torch._dynamo" in sys.modules)
"""


def test_to_look_at_layers_loads_no_compiler() -> None:
    """The compiler takes two seconds on each rank; only the rank that measures costs loads it."""
    done = run_fresh("-c", LOOKS)

    assert done.stdout == "False\n", done


# -- what is refused ------------------------------------------------------------------------


def test_two_uses_within_one_layer_may_start_themselves() -> None:
    def build() -> nn.Module:
        return nn.Sequential(linear(3, 3)(), linear(3, 3)())

    found = profile(model(Layer("a", build), ties=[Tie("a.0.weight", "a.1.weight")]))

    assert found.ties == {"a.1.weight": "a.0.weight"}
