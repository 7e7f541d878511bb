"""Dense gradients become compressed ones in a hook, and live no longer than it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.runs import matrices, random_init
from support.sums import by_gather, sample_all
from torch import Tensor, nn

from axsparse.models.layer import Layer
from axsparse.samo import gradient_hooks
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.gradient_hooks import GradientCollector, SparseWeight
from axsparse.samo.host.sparse_products import FEWEST_TOKENS
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.layer_state import LayerState
from axsparse.samo.state_bytes import StateFormat
from axsparse.samo.tensor_state import TensorState

WIDTH = 8


def linear(inputs: int = WIDTH) -> nn.Module:
    return nn.Linear(inputs, WIDTH)


def layers(
    *builds: Callable[[], nn.Module],
    sparsity: float = 0.5,
    dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    backend: Backend = HOST,
) -> list[BuiltLayer]:
    specs = [
        Layer(f"layer{number}", build, init=random_init) for number, build in enumerate(builds)
    ]
    options = StateOptions(
        StateFormat(dtype, gradient_dtype), seed=1, masks=matrices(specs, sparsity), backend=backend
    )
    return build_layers(specs, {}, options)


def forward(built: Sequence[BuiltLayer], seed: int = 0) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    for layer in built:
        x = layer.module(x)
    return x.square().sum()


def collector(
    built: Sequence[BuiltLayer], on_ready: Callable[[LayerState], None] = lambda layer: None
) -> GradientCollector:
    return GradientCollector([layer.state for layer in built], on_ready, nullcontext)


def dense_gradients(built: Sequence[BuiltLayer], seed: int = 0) -> dict[str, Tensor]:
    """The gradients of autograd, by global name; there must be no hooks."""
    tensors = [tensor for layer in built for tensor in layer.state.tensors]
    gradients = torch.autograd.grad(forward(built, seed), [t.parameter for t in tensors])
    return {t.name: g for t, g in zip(tensors, gradients, strict=True)}


def test_the_kept_entries_of_every_gradient_are_gathered_and_the_dense_one_is_freed() -> None:
    built = layers(linear, linear)
    expected = dense_gradients(built)
    collecting = collector(built)

    collecting.begin()
    forward(built).backward()

    for layer in built:
        for tensor in layer.state.tensors:
            kept = expected[tensor.name].view(-1)[tensor.index.positions()]
            assert torch.equal(layer.state.gradient_of(tensor), kept)
            own = layer.state.running_gradient(tensor)
            grad = tensor.parameter.grad
            assert (grad is None) is (own is None) is (tensor.kept < tensor.parameter.numel())
            if own is not None and grad is not None:
                assert grad.data_ptr() == own.data_ptr()  # to which autograd adds by itself


def test_a_hook_of_the_users_sees_the_gradient_of_each_microbatch() -> None:
    """Also of a tensor of which everything is kept, to whose sum autograd would add by itself."""
    built = layers(linear)
    [bias] = [tensor for tensor in built[0].state.tensors if tensor.name == "layer0.bias"]
    expected = [dense_gradients(built, seed)["layer0.bias"] for seed in (0, 1)]
    seen: list[Tensor] = []

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    bias.parameter.register_post_accumulate_grad_hook(note)
    collecting = collector(built)
    collecting.begin()
    for seed in (0, 1):
        forward(built, seed).backward()

    assert torch.equal(torch.stack(seen), torch.stack(expected))
    assert torch.equal(built[0].state.gradient_of(bias), expected[0] + expected[1])


def test_no_dense_gradient_of_a_later_layer_lives_when_an_earlier_ones_hook_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = layers(linear, linear, linear)
    collecting = collector(built)
    storages: list[weakref.ref[Tensor]] = []
    alive_at_hook: list[int] = []
    accumulate = LayerState.accumulate

    def watched(self: LayerState, tensor: TensorState, dense: Tensor) -> None:
        alive_at_hook.append(sum(reference() is not None for reference in storages))
        storages.append(weakref.ref(dense))
        accumulate(self, tensor, dense)

    monkeypatch.setattr(LayerState, "accumulate", watched)
    collecting.begin()
    forward(built).backward()

    assert alive_at_hook == [0] * 6
    assert [reference() for reference in storages] == [None] * 6


class Sometimes(nn.Module):
    """A linear map whose second half is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.uses_spare = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        if self.uses_spare:
            y = y + self.spare(x)
        return y


def test_finish_takes_unused_tensors_as_zero_and_names_them() -> None:
    """One that only an earlier microbatch used keeps its gradient."""
    built = layers(Sometimes, linear)
    reported: list[str] = []
    collecting = collector(built, lambda layer: reported.append(layer.name))
    state, module = built[0].state, built[0].module
    assert isinstance(module, Sometimes)
    state.gradient.fill_(5.0)

    for uses_spare in (False, True):
        reported.clear()
        collecting.begin()
        module.uses_spare = uses_spare
        forward(built).backward()
        module.uses_spare = False
        collecting.microbatch(is_last=True)
        forward(built).backward()
        assert reported == ["layer1"]
        unused = collecting.finish()

        assert unused == ([] if uses_spare else ["layer0.spare.weight", "layer0.spare.bias"])
        assert reported == ["layer1", "layer0"]
        spare = state.gradient_of(state.by_full_name["layer0.spare.weight"])
        assert bool(spare.any()) is uses_spare
        assert state.gradient_of(state.by_full_name["layer0.always.weight"]).any()


def frozen_weight() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("builds", "order"),
    [
        ((frozen_weight, linear), ["layer1", "layer0"]),
        # Without trained parameters, when the last backward begins.
        ((linear, nn.Tanh), ["layer1", "layer0"]),
    ],
)
def test_what_is_not_trained_has_no_gradient_and_holds_nothing_up(
    builds: tuple[Callable[[], nn.Module], ...], order: list[str]
) -> None:
    built = layers(*builds)
    reported: list[str] = []
    collecting = collector(built, lambda layer: reported.append(layer.name))

    for _ in range(2):
        collecting.begin()
        collecting.microbatch(is_last=True)
        forward(built).backward()
        assert collecting.finish() == []

    assert reported == order * 2


# -- the vectors of a layer on a GPU, added together ------------------------------------------


class Vectors(nn.Module):
    """x · a + b, whose backward reaches b first; without a where `scales` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(WIDTH))
        self.b = nn.Parameter(torch.empty(WIDTH))
        self.scales = True

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a if self.scales else x) + self.b


def no_kernel(kernel: str, blocks: int, *arguments: object) -> None:
    raise AssertionError(f"{kernel}: vectors that wait for each other take none")


def vectors_in_bf16(on_ready: Callable[[LayerState], None]) -> tuple[Vectors, GradientCollector]:
    spec = Layer("layer", Vectors, init=random_init)
    backend = Backend(torch.device("cpu"), no_kernel)
    options = StateOptions(StateFormat(torch.bfloat16, torch.float32), 1, None, backend=backend)
    built = build_layers([spec], {}, options)
    assert isinstance(built[0].module, Vectors)
    return built[0].module, collector(built, on_ready)


@pytest.mark.parametrize("has_both", [(1, 1, 1), (1, 1, 0), (1, 0, 1), (0,)])
@pytest.mark.parametrize("says_so", [False, True])
def test_vectors_that_wait_for_each_other_are_in_the_sums_before_a_layer_is_reported(
    has_both: tuple[int, ...], says_so: bool
) -> None:
    """`has_both` says of each microbatch whether both vectors have a gradient."""
    reported: list[dict[str, Tensor]] = []

    def note(state: LayerState) -> None:
        reported.append({t.name: state.sums_of(t).clone() for t in state.tensors})

    module, collecting = vectors_in_bf16(note)
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    of_a, of_b = torch.zeros(WIDTH), torch.zeros(WIDTH)
    collecting.begin()
    for number, module.scales in enumerate(map(bool, has_both)):
        collecting.microbatch(is_last=number == len(has_both) - 1)
        (module(x) * (number + 1)).sum().backward()
        of_a += (x * (number + 1)).sum(0).float() * module.scales
        of_b += 3.0 * (number + 1)
    if says_so and not module.scales:
        collecting.complete(module.a)  # as what takes gradients out of a backward does
        assert len(reported) == 1

    assert collecting.finish() == ([] if any(has_both) else ["layer.a"])
    [sums] = reported
    assert torch.equal(sums["layer.b"], of_b)
    if any(has_both):
        assert torch.equal(sums["layer.a"], of_a)


# -- kept entries that are computed alone -----------------------------------------------------


@pytest.fixture
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are sampled, by any processor."""
    sample_all(monkeypatch)
    monkeypatch.setattr(gradient_hooks, "FEWEST_TOKENS", FEWEST_TOKENS)


class Sampled:
    """Two layers in bf16, of which the first has a bias, and the collector of their gradients."""

    def __init__(self, gradient_dtype: torch.dtype = torch.float32, sparsity: float = 0.9) -> None:
        plain = partial(nn.Linear, WIDTH, WIDTH, bias=False)
        built = layers(
            linear, plain, sparsity=sparsity, dtype=torch.bfloat16, gradient_dtype=gradient_dtype
        )
        self.layers = [layer.state for layer in built]
        self.ready: list[str] = []
        self.collector = collector(built, lambda layer: self.ready.append(layer.name))

    def weight(self, number: int) -> SparseWeight:
        self.collector.allow_sparse_products(["layer0.weight", "layer1.weight"])
        found = self.collector.sparse_products(self.layers[number].tensors[0].parameter)
        assert found is not None
        return found


def factors(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 200, WIDTH, generator=generator).to(torch.bfloat16)
    return drawn[0], drawn[1]


@pytest.mark.usefixtures("any_processor")
def test_the_parts_of_a_microbatch_s_gradient_are_added_first_and_the_first_one_replaces() -> None:
    """Parts are rounded as in a dense gradient."""
    case = Sampled()
    weight = case.weight(0)
    parameter = weight.tensor.parameter
    case.collector.begin()
    assert weight.accumulate(*factors(7))
    case.collector.complete(parameter)

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
    assert torch.equal(case.layers[0].gradient_of(weight.tensor), total)
    assert case.collector.finish() == ["layer0.bias", "layer1.weight"]


@pytest.mark.usefixtures("any_processor")
def test_a_layer_is_ready_once_with_the_last_of_its_gradients() -> None:
    case = Sampled()
    first, second = case.weight(0), case.weight(1)
    case.collector.begin()
    for is_last in (False, True):
        case.collector.microbatch(is_last=is_last)
        assert second.accumulate(*factors(1))
        assert case.ready == [], "there may be another gradient"
        case.collector.complete(second.tensor.parameter)
        assert case.ready == ["layer1"] * is_last
        case.collector.complete(first.tensor.parameter)
        assert case.ready == ["layer1"] * is_last, "the bias is missing"
    case.layers[0].by_full_name["layer0.bias"].parameter.float().sum().backward()

    assert case.ready == ["layer1", "layer0"]
    assert case.collector.finish() == ["layer0.weight"]
    assert case.ready == ["layer1", "layer0"]


@pytest.mark.usefixtures("any_processor")
def test_what_is_deferred_is_left_alone() -> None:
    case = Sampled(torch.bfloat16, sparsity=0)
    tensor = case.layers[0].tensors[0]
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


@pytest.mark.usefixtures("any_processor")
def test_a_sum_of_a_step_before_does_not_replace_what_is_sampled() -> None:
    """A tensor of which all was kept, and that a step's last microbatch did not use, is pruned: the
    next step samples its first microbatch and has a full gradient of its second."""
    case = Sampled(torch.bfloat16, sparsity=0)
    tensor = case.layers[0].tensors[0]
    case.collector.begin()
    case.collector.microbatch(is_last=False)
    tensor.parameter.sum().backward()
    assert tensor.parameter.grad is not None
    case.collector.microbatch(is_last=True)
    case.collector.finish()
    mask = torch.arange(WIDTH * WIDTH) % 10 == 0
    case.layers[0].remask("layer0.weight", mask)

    case.collector.begin()
    rows, outer = factors(1)
    assert case.weight(0).accumulate(rows, outer)
    case.collector.complete(tensor.parameter)
    tensor.parameter.sum().backward()

    total = by_gather(outer, rows, tensor.index) + 1
    assert torch.equal(case.layers[0].gradient_of(tensor), total)


@pytest.mark.usefixtures("any_processor")
def test_products_are_of_named_weights_of_their_type_and_of_many_tokens() -> None:
    case = Sampled()
    case.collector.allow_sparse_products(["layer1.weight"])
    allowed = [case.collector.sparse_products(each.tensors[0].parameter) for each in case.layers]
    assert [weight is not None for weight in allowed] == [False, True]
    weight = case.weight(0)
    rows, bias = torch.zeros(FEWEST_TOKENS, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH)

    wrong = [(rows[1:], None), (rows.float(), None), (rows, bias)]
    assert [weight.output(*given) for given in wrong] == [None] * 3
    for own in (None, bias.to(torch.bfloat16)):
        found = weight.output(rows, own)
        assert found is not None and found.shape == rows.shape
