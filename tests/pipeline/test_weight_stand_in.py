"""A split backward makes the same gradients as a whole one, bit by bit, and makes some later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.allocated import peak_of_torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.splittable_weights import WeightSplit
from axsparse.pipeline.stage import Key, Stage
from axsparse.runtime.errors import ConfigError

KEY = Key(0, 0)
Grads = dict[str, Tensor | None]


def stage_of(module: nn.Module, *, is_split: bool, is_recomputed: bool = False) -> Stage:
    runner = LayerRunner("layer", module, is_random=False, is_recomputed=is_recomputed)
    split = WeightSplit([("layer", module)]) if is_split else None
    return Stage([runner], loss=None, metrics={}, input_dtype=None, seed=0, split=split)


def gradient_of(output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def run_whole(module: nn.Module, x: Tensor, seed: int = 1) -> tuple[Grads, Tensor | None]:
    """The gradients of the weights and of the input, by torch's own backward."""
    stage = stage_of(module, is_split=False)
    x = x.detach().requires_grad_(x.requires_grad)
    (y,) = stage.forward(0, (x,), KEY, None, 1.0)
    stage.backward(0, [gradient_of(y, seed)], 1.0)
    return {name: p.grad for name, p in module.named_parameters()}, x.grad


def run_split(
    module: nn.Module, x: Tensor, seed: int = 1, *, is_recomputed: bool = False
) -> tuple[Grads, Grads, Tensor | None, Stage]:
    """Those that the second microbatch makes in its backward, all of them after its weight
    gradients have run, and that of the input."""
    stage = stage_of(module, is_split=True, is_recomputed=is_recomputed)
    for microbatch in range(2):
        module.zero_grad()
        x = x.detach().requires_grad_(x.requires_grad)
        (y,) = stage.forward(microbatch, (x,), KEY, None, 1.0)
        stage.backward(microbatch, [gradient_of(y, seed)], 1.0)
        early = {name: p.grad for name, p in module.named_parameters()}
        early = {name: None if g is None else g.clone() for name, g in early.items()}
        stage.weight_gradients(microbatch)
    return early, {name: p.grad for name, p in module.named_parameters()}, x.grad, stage


def assert_same(found: Grads, expected: Grads) -> None:
    for name, gradient in expected.items():
        other = found[name]
        if gradient is None or other is None:
            assert gradient is other, name
            continue
        assert other.dtype == gradient.dtype and other.shape == gradient.shape
        assert torch.equal(other, gradient), name


class Transposed(nn.Module):
    """Gives a linear layer an input that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.transpose(0, 1))
        return out


class ByName(nn.Module):
    """Calls the function itself, with arguments by name, and writes into the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 24))
        self.bias = nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(bias=self.bias, input=x.tanh(), weight=self.weight).relu_()


class Attention(nn.Module):
    """Three products of one input, whose output gradients are strided."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], 3, 8).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 2, self.weight) - self.bias


def frozen_bias(module: nn.Linear | nn.Conv2d) -> nn.Module:
    assert module.bias is not None
    module.bias.requires_grad_(False)
    return module


LINEAR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "2-d": (lambda: nn.Linear(24, 40), (7, 24), ["weight"]),
    "3-d": (lambda: nn.Linear(24, 40), (3, 5, 24), ["weight"]),
    "no bias": (lambda: nn.Linear(24, 40, bias=False), (3, 5, 24), ["weight"]),
    "one row": (lambda: nn.Linear(24, 40), (1, 24), ["weight"]),
    "one output": (lambda: nn.Linear(24, 1), (3, 5, 24), ["weight"]),
    "frozen bias": (lambda: frozen_bias(nn.Linear(24, 40)), (7, 24), ["weight"]),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(24, 40), nn.ReLU(inplace=True), nn.Linear(40, 8)),
        (3, 5, 24),
        ["0.weight", "2.weight"],
    ),
    "by name": (ByName, (7, 24), ["weight"]),
    "attention": (Attention, (3, 5, 24), ["q.weight", "k.weight", "v.weight", "out.weight"]),
    "subclass": (lambda: Subclass(24, 40), (7, 24), ["weight"]),
}
CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "1-d": (lambda: nn.Conv1d(6, 9, 3), (4, 6, 17), ["weight", "bias"]),
    "2-d": (lambda: nn.Conv2d(6, 9, 3, stride=2, padding=1), (4, 6, 9, 9), ["weight", "bias"]),
    "3-d": (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 5, 6), ["weight", "bias"]),
    "one by one": (lambda: nn.Conv2d(6, 9, 1, bias=False), (4, 6, 9, 9), ["weight"]),
    "groups": (
        lambda: nn.Conv2d(6, 12, 3, groups=6, dilation=2, padding="same"),
        (4, 6, 9, 9),
        ["weight", "bias"],
    ),
    "uneven": (lambda: nn.Conv2d(6, 9, 3, padding=(1, 0)), (4, 6, 9, 9), ["weight", "bias"]),
    "reflected": (
        lambda: nn.Conv2d(6, 9, 3, padding=1, padding_mode="reflect"),
        (4, 6, 9, 9),
        ["weight", "bias"],
    ),
    "frozen bias": (lambda: frozen_bias(nn.Conv2d(6, 9, 3)), (4, 6, 9, 9), ["weight"]),
    "norm": (
        lambda: nn.Sequential(
            nn.Conv2d(6, 9, 3, bias=False), nn.BatchNorm2d(9), nn.ReLU(True), nn.Conv2d(9, 4, 3)
        ),
        (4, 6, 9, 9),
        ["0.weight", "3.weight", "3.bias"],
    ),
}
CASES = {f"linear, {name}": case for name, case in LINEAR.items()} | {
    f"convolution, {name}": case for name, case in CONVOLUTIONS.items()
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_autograd_and_weight_gradients_later(case: str, precision: str) -> None:
    make, shape, late = CASES[case]
    torch.manual_seed(4)
    module = make()
    dtype = TYPES[precision]
    module = module.to(dtype)
    if precision == "fp16" and "reflected" in case and torch.__version__ < "2.5":
        pytest.skip("torch 2.4 cannot reflect fp16 on a CPU")
    for needs_gradient in (True, False):
        x = torch.randn(shape, dtype=dtype, requires_grad=needs_gradient)
        whole, of_input = run_whole(copy.deepcopy(module), x)

        early, found, split_of_input, stage = run_split(module, x)

        assert stage.whole == {}
        assert [name for name in late if early[name] is not None] == []
        assert_same(found, whole)
        assert_same({"x": split_of_input}, {"x": of_input})
        assert_same(
            {k: v for k, v in early.items() if k not in late},
            {k: v for k, v in whole.items() if k not in late},
        )


def test_an_input_that_is_not_contiguous_gets_the_bits_of_autograd() -> None:
    module = Transposed()
    x = torch.randn(3, 5, 24, requires_grad=True)
    whole, of_input = run_whole(copy.deepcopy(module), x)

    _, found, split_of_input, _ = run_split(module, x)

    assert_same(found, whole)
    assert_same({"x": split_of_input}, {"x": of_input})


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.inner(x))
        return out


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return weight * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        weight: Tensor
        (weight,) = ctx.saved_tensors
        return 2 * weight * gradient


class Squared(nn.Module):
    """Uses a weight by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        square: Callable[..., Tensor] = Square.apply
        squared = square(self.weight)
        return x @ squared


class Product(nn.Module):
    """Multiplies by a weight that is not transposed, as older transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Decayed(nn.Module):
    """Adds a term of the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.inner.weight.sum()
        return out


class Ascending(nn.Module):
    """Follows the gradient of a score, which autograd computes inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.score(at).tanh().sum(), at, create_graph=True)
        return x + slope


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(24, 24, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    module[2].weight = module[0].weight
    return module


WHOLE: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "twice": (Twice, {"inner.weight": "one microbatch uses it 2 times"}),
    "tied": (tied, {"0.weight": "one microbatch uses it 2 times"}),
    "own function": (Squared, {"weight": "Square"}),
    "product": (Product, {"weight": "Mm"}),
    "decayed": (Decayed, {"inner.weight": "one microbatch uses it 2 times"}),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(24, 24)),
        {
            "parametrizations.weight.original0": "WeightNormInterface",
            "parametrizations.weight.original1": "WeightNormInterface",
        },
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), nn.ConvTranspose2d(5, 3, 2)),
        {"1.weight": "a transposed convolution"},
    ),
    "ascending": (Ascending, {"score.weight": "one microbatch uses it 2 times"}),
}


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_split_stays_whole_and_says_why(case: str, is_recomputed: bool) -> None:
    make, reasons = WHOLE[case]
    torch.manual_seed(4)
    module = make()
    x = torch.randn(3, 5, 24, requires_grad=True)
    whole, of_input = run_whole(copy.deepcopy(module), x)

    early, found, split_of_input, stage = run_split(module, x, is_recomputed=is_recomputed)

    assert stage.whole == {f"layer.{name}": why for name, why in reasons.items()}
    assert_same(early, whole)
    assert_same(found, whole)
    assert_same({"x": split_of_input}, {"x": of_input})


@pytest.mark.parametrize("make", [SelfAttention, Recurrent])
def test_weights_that_torch_hands_on_inside_are_whole_from_the_second_step(
    make: Callable[[], nn.Module],
) -> None:
    """Their graph is that of linear layers; the calls are not."""
    torch.manual_seed(4)
    module = make()
    x = torch.randn(3, 5, 24, requires_grad=True)
    whole, _ = run_whole(copy.deepcopy(module), x)

    _, found, _, stage = run_split(module, x)

    assert_same(found, whole)
    module.zero_grad()
    (y,) = stage.forward(2, (x,), KEY, None, 1.0)
    stage.backward(2, [gradient_of(y, 1)], 1.0)
    assert_same({name: p.grad for name, p in module.named_parameters()}, whole)
    assert stage._split is not None and stage._split.plan == ()
    stage.weight_gradients(2)
    assert_same({name: p.grad for name, p in module.named_parameters()}, whole)


class Checkpointed(nn.Module):
    """Recomputes a part of itself."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24)
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self._inner, x, use_reentrant=self._use_reentrant)
        out: Tensor = self.second(inner)
        return out

    def _inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x).tanh()
        return out


RECOMPUTED: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "by the stage": (lambda: nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)), True),
    "by itself": (partial(Checkpointed, use_reentrant=False), False),
    "by both": (partial(Checkpointed, use_reentrant=False), True),
    "by itself, reentrant": (partial(Checkpointed, use_reentrant=True), False),
}


@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputed_layers_are_split_as_well(case: str) -> None:
    make, is_recomputed = RECOMPUTED[case]
    torch.manual_seed(4)
    module = make()
    x = torch.randn(3, 5, 24, requires_grad=True)
    whole, of_input = run_whole(copy.deepcopy(module), x)

    early, found, split_of_input, _ = run_split(module, x, is_recomputed=is_recomputed)

    second = "second.weight" if isinstance(module, Checkpointed) else "2.weight"
    assert early[second] is None
    assert_same(found, whole)
    assert_same({"x": split_of_input}, {"x": of_input})


def test_a_part_that_is_recomputed_keeps_no_activations_for_its_weights() -> None:
    """They are kept from the backward on."""
    module = nn.Sequential(nn.Linear(24, 400), nn.Tanh(), nn.Linear(400, 24))
    stage = stage_of(module, is_split=True, is_recomputed=True)
    x = torch.randn(3, 24, requires_grad=True)
    for microbatch in range(2):
        (y,) = stage.forward(microbatch, (x,), KEY, None, 1.0)
        held = stage.late_bytes
        stage.backward(microbatch, [torch.ones_like(y)], 1.0)

    assert held == 0
    values = (24 + 400) + (400 + 24)  # of each row: input and output gradient of both layers
    assert stage.late_bytes == 3 * values * 4


def test_what_several_products_share_is_counted_once_and_freed_with_the_last() -> None:
    module = Attention()
    stage = stage_of(module, is_split=True)
    x = torch.randn(3, 5, 24, requires_grad=True)
    for microbatch in range(3):
        (y,) = stage.forward(microbatch, (x,), KEY, None, 1.0)
        stage.backward(microbatch, [torch.ones_like(y)], 1.0)

    # The first microbatch was whole. Inputs of q, k, v and out are x and the heads; the gradients
    # of the three heads are a tensor each. x itself is the same in both microbatches.
    assert stage.late_bytes == x.nbytes + 2 * 5 * x.nbytes
    assert stage.held == 3
    for microbatch in range(3):
        stage.weight_gradients(microbatch)
    assert (stage.late_bytes, stage.held) == (0, 0)


def test_hooks_see_what_they_saw() -> None:
    def watched(*, is_split: bool) -> list[tuple[str, Tensor]]:
        torch.manual_seed(4)
        first = nn.Linear(24, 40)
        module = nn.Sequential(first, nn.Tanh(), nn.Linear(40, 24))
        seen: list[tuple[str, Tensor]] = []

        def doubles(gradient: Tensor) -> Tensor:
            seen.append(("weight", gradient.clone()))
            return gradient * 2

        def notes(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(("accumulated", parameter.grad.clone()))

        def notes_module(_: object, of_inputs: object, __: object) -> None:
            assert isinstance(of_inputs, tuple)
            seen.append(("module", of_inputs[0]))

        first.weight.register_hook(doubles)
        first.weight.register_post_accumulate_grad_hook(notes)
        first.register_forward_hook(lambda m, args, y: seen.append(("forward", y.detach())))
        first.register_full_backward_hook(notes_module)
        x = torch.randn(3, 5, 24, requires_grad=True)
        if is_split:
            run_split(module, x)
        else:
            run_whole(module, x)
        return seen

    whole, split = watched(is_split=False), watched(is_split=True)

    # The first microbatch runs whole. In the second one the weight comes after all else.
    first, second = split[: len(whole)], split[len(whole) :]
    for found in (first, second):
        by_name = dict(found)
        assert by_name.keys() == dict(whole).keys()
        assert all(torch.equal(by_name[name], value) for name, value in whole)
    assert [name for name, _ in second] == ["forward", "module", "weight", "accumulated"]


class Changing(nn.Module):
    """Uses its weight in another way from the second microbatch on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self._hidden = [self.inner.weight]
        self.way, self.calls = way, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        if self.calls > 1:
            if self.way == "also otherwise":
                out = out + self.inner.weight.sum()
            elif self.way == "twice":
                out = self.inner(out)
            elif self.way == "not contiguous":
                out = self.inner(x.transpose(0, 1)).transpose(0, 1)
            elif self.way == "not at all":
                out = x * self.inner.bias
            elif self.way == "by a reference of its own":
                out = out + self._hidden[0].sum()
        return out


@pytest.mark.parametrize("way", ["also otherwise", "twice", "not contiguous", "not at all"])
def test_a_weight_that_is_used_otherwise_later_keeps_its_bits(way: str) -> None:
    torch.manual_seed(4)
    module = Changing(way)
    x = torch.randn(3, 5, 24, requires_grad=True)
    other = copy.deepcopy(module)
    other.calls = 1
    whole, of_input = run_whole(other, x)

    early, found, split_of_input, stage = run_split(module, x)

    assert early["inner.weight"] is None
    assert_same(found, whole)
    assert_same({"x": split_of_input}, {"x": of_input})
    stage.forward(2, (x,), KEY, None, 1.0)
    reason = {"layer.inner.weight": "used by more than a linear or convolution call"}
    assert stage.whole == (reason if way in ("also otherwise", "not contiguous") else {})


def test_a_gradient_that_comes_before_its_turn_is_refused() -> None:
    module = Changing("by a reference of its own")

    with pytest.raises(ConfigError, match=r"inner\.weight: it is used outside linear and convolut"):
        run_split(module, torch.randn(3, 5, 24, requires_grad=True))


def test_an_activation_that_changes_before_its_weight_gradient_is_refused() -> None:
    module = nn.Linear(24, 24)
    stage = stage_of(module, is_split=True)
    x = torch.randn(3, 24, requires_grad=True)
    for microbatch in range(2):
        (y,) = stage.forward(microbatch, (x,), KEY, None, 1.0)
        stage.backward(microbatch, [torch.ones_like(y)], 1.0)
    with torch.no_grad():
        x.zero_()

    stage.weight_gradients(0)
    with pytest.raises(
        ConfigError, match=r"layer\.weight: an activation or its gradient was writt"
    ):
        stage.weight_gradients(1)


def test_modules_have_their_weights_back_whatever_happens() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if x.shape[0] == 2:
                raise RuntimeError("two rows")
            return out

    module = Failing(24, 24)
    weight = module.weight
    stage = stage_of(module, is_split=True)
    stage.forward(0, (torch.randn(3, 24),), KEY, None, 1.0)
    with pytest.raises(RuntimeError, match="two rows"):
        stage.forward(1, (torch.randn(2, 24),), KEY, None, 1.0)

    assert module.weight is weight
    assert stage._split is not None
    [slot] = stage._split.plan
    assert slot.weight is weight


def test_at_most_one_dense_weight_gradient_is_there_at_a_time() -> None:
    """A hook that frees each as it comes, as compression does."""
    width, layers = 256, 8
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    stage = stage_of(module, is_split=True)
    x = torch.randn(1, width, requires_grad=True)
    for microbatch in range(2):
        (y,) = stage.forward(microbatch, (x,), KEY, None, 1.0)
        stage.backward(microbatch, [torch.ones_like(y)], 1.0)
    stage.weight_gradients(0)

    peak = peak_of_torch(lambda: stage.weight_gradients(1))

    assert width * width * 4 <= peak < 1.5 * width * width * 4
