"""Layers built into their final storage: values by name, ties, and memory on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from support.allocated import peak_of_torch
from support.runs import matrices, random_init
from torch import Tensor, nn

from axsparse.models.layer import InitFunction, Layer
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.expansion import Expansion
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, given_value
from axsparse.samo.layer_construction import build_layers as build_layers_with
from axsparse.samo.precision import round_to
from axsparse.samo.state_bytes import StateFormat


def options(*, half: bool = False, seed: int = 1) -> StateOptions:
    dtype = torch.bfloat16 if half else torch.float32
    return StateOptions(StateFormat(dtype, dtype, ("exp_avg", "exp_avg_sq")), seed, None)


def build_layers(
    layers: Sequence[Layer], ties: Mapping[str, str], options: StateOptions
) -> list[BuiltLayer]:
    """With three quarters of every matrix pruned."""
    return build_layers_with(layers, ties, replace(options, masks=matrices(layers, 0.75)))


def parameters(layers: Sequence[BuiltLayer]) -> dict[str, Tensor]:
    return {
        f"{layer.spec.name}.{name}": parameter.detach()
        for layer in layers
        for name, parameter in layer.module.named_parameters()
    }


# -- layers that initialise themselves ------------------------------------------------------


def forgetful_init(name: str, shape: tuple[int, ...], _: torch.Generator) -> Tensor:
    """Leaves its generator unused."""
    return nn.init.normal_(torch.empty(shape))


@pytest.mark.parametrize("init", [None, forgetful_init, random_init])
def test_a_layer_starts_from_seed_and_name_and_leaves_torchs_generator(
    init: InitFunction | None,
) -> None:
    layers = [Layer(name, lambda: nn.Linear(4, 6), init=init) for name in ("a", "b")]
    torch.manual_seed(5)
    before = torch.get_rng_state()

    both = parameters(build_layers_with(layers, {}, options()))
    after = torch.get_rng_state()
    torch.manual_seed(6)
    alone = parameters(build_layers_with(layers[1:], {}, options()))
    other = parameters(build_layers_with(layers, {}, options(seed=2)))

    assert torch.equal(before, after)
    assert torch.equal(alone["b.weight"], both["b.weight"])
    assert not torch.equal(both["a.weight"], both["b.weight"])
    assert not torch.equal(both["a.weight"], other["a.weight"])


@pytest.mark.parametrize("init", [None, random_init])
def test_what_is_frozen_gets_its_start_value_and_is_never_pruned(init: InitFunction | None) -> None:
    def build() -> nn.Module:
        module = nn.Linear(4, 2)
        nn.init.constant_(module.weight, 0.5)
        module.weight.requires_grad_(False)
        nn.init.constant_(module.bias, 2.0)
        return module

    (built,) = build_layers([Layer("a", build, init=init)], {}, options(half=True))

    weight, bias = built.module.get_parameter("weight"), built.module.get_parameter("bias")
    drawn = random_init("weight", (2, 4), keyed_generator(1, "a.weight", "init"))
    start = torch.full((2, 4), 0.5) if init is None else drawn
    assert torch.equal(weight, round_to(start, torch.bfloat16))
    assert init is not None or bias.tolist() == [2.0, 2.0]
    assert bias.dtype == torch.bfloat16
    assert (weight.requires_grad, bias.requires_grad) == (False, True)
    assert [tensor.name for tensor in built.state.tensors] == ["a.bias"]
    assert built.state.frozen == (weight,)


# -- ties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [True, False])
def test_both_uses_of_a_weight_on_one_stage_share_one_storage(half: bool) -> None:
    tied = [Layer(name, lambda: nn.Linear(4, 6, bias=False), init=random_init) for name in "ab"]
    first, second = build_layers(tied, {"b.weight": "a.weight"}, options(half=half))

    one, other = first.state.by_full_name["a.weight"], second.state.tensors[0]
    assert other.alias_of is one
    assert other.parameter.data_ptr() == one.parameter.data_ptr()
    assert other.parameter is not one.parameter
    assert other.index is one.index
    assert second.state.owned == []


# -- memory on the way ----------------------------------------------------------------------


@pytest.mark.parametrize("half", [True, False])
def test_a_layer_without_init_is_the_only_one_that_is_dense_while_it_is_built(half: bool) -> None:
    """Where weights are sparse at rest; one tensor's mask and temporaries are besides."""
    dtype, width = torch.bfloat16 if half else torch.float32, 400
    expansion = Expansion(dtype, torch.device("cpu"))
    layers = [
        Layer(name, lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))
        for name in "abcd"
    ]
    built: list[BuiltLayer] = []

    def build() -> None:
        built.extend(build_layers(layers, {}, replace(options(half=half), expansion=expansion)))

    peak = peak_of_torch(build)

    final = sum(layer.state.live_bytes().total for layer in built) + expansion.nbytes
    tensor = 4 * width * (width + 1)
    assert peak <= final + 3 * tensor + tensor


# -- what modules hang on their parameters --------------------------------------------------


class Hooked(nn.Module):
    """Doubles the gradient of its weight by a hook, and keeps the weight in a second place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.handle = self.linear.weight.register_hook(lambda gradient: 2 * gradient)
        self.linear.weight.register_post_accumulate_grad_hook(self.note)
        vars(self.linear.weight)["tag"] = "mine"
        self.held = [self.linear.weight]
        self.note_errors: list[Tensor] = []

    def note(self, parameter: Tensor) -> None:
        self.note_errors.append(parameter)


@pytest.mark.parametrize(
    ("init", "half"), [(None, False), (None, True), (random_init, False), (random_init, True)]
)
def test_hooks_attributes_and_other_places_of_a_parameter_stay(
    init: InitFunction | None, half: bool
) -> None:
    (built,) = build_layers([Layer("a", Hooked, init=init)], {}, options(half=half))

    module = built.module
    assert isinstance(module, Hooked)
    weight = module.linear.weight
    ones = torch.ones(1, 3, dtype=weight.dtype)
    assert module.held[0] is weight and not weight.is_meta
    assert built.state.by_full_name["a.linear.weight"].parameter is weight
    assert vars(weight)["tag"] == "mine"
    for factor in (2.0, 1.0):
        module.linear(ones).sum().backward()
        assert weight.grad is not None and weight.grad.eq(factor).all()
        module.handle.remove()
        weight.grad = None
    assert module.note_errors == [weight] * 2


@pytest.mark.parametrize(("other", "is_given"), [(0.0, True), (1.0, False)])
def test_a_frozen_value_is_the_given_one_only_while_it_rounds_to_what_is_stored(
    other: float, is_given: bool
) -> None:
    """A resumed run may get other start values than its checkpoint has."""
    given = torch.tensor([0.1, 1 / 3])
    stored = (given + other).bfloat16()

    class Given:
        fingerprint = ""

        def read(self, name: str) -> Tensor | None:
            return given if name == "weight" else None

    assert given_value(Given(), "weight", stored) is (given if is_given else stored)
    assert given_value(Given(), "bias", stored) is stored
    assert given_value(None, "weight", stored) is stored
