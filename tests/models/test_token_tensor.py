"""Activations of which each member has some tokens: the values and gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.runs import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from axsparse.models.chunked_tensor import ChunkedTensor, chunked
from axsparse.models.layer import Split
from axsparse.models.tensor_group import Cut, TensorGroup, spread
from axsparse.models.tensor_parallel import Row
from axsparse.models.token_tensor import TokenTensor, by_tokens, call_layer, joined, whole_in
from axsparse.runtime.canonical_form import ALIGNMENT
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

CHUNKS, SHAPE = 4, (2, 8, 6)
WEIGHT = nn.Parameter(torch.linspace(-1, 1, 6))
ROWS = nn.Parameter(torch.linspace(-2, 1, 48).view(8, 6))


def on_members(size: int, body: Callable[[TensorGroup], Any]) -> list[Any]:
    """What a body returns on each member of a group."""

    def of_rank(transport: Transport) -> Any:
        place = Grid(1, 1, size).place(transport.rank)
        return body(TensorGroup(place, transport, CHUNKS))

    return on_ranks(size, of_rank)


def alone(body: Callable[[TensorGroup], Any]) -> Any:
    return on_members(1, body)[0]


def whole() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


def tokens_of(group: TensorGroup, leaf: Tensor) -> Any:
    cut = Cut(SHAPE, 1, 1, CHUNKS)
    return by_tokens(group, [cut.take(leaf, chunk) for chunk in group.own])


def rms_norm(x: Tensor) -> Tensor:
    """As transformers writes it."""
    wide = x.to(torch.float64)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return WEIGHT * wide.to(x.dtype)


BY_TOKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "residual": lambda x: x + 2 * x - x / 3,
    "reflected": lambda x: 1 - x + (2 / (x * x + 1)),
    "layer norm": lambda x: F.layer_norm(x, (6,), WEIGHT, WEIGHT),
    "layer norm by name": lambda x: F.layer_norm(x, normalized_shape=(6,), weight=WEIGHT),
    "rms norm": rms_norm,
    "torch's rms norm": lambda x: F.rms_norm(x, (6,), WEIGHT),
    "bias": lambda x: x + WEIGHT,
    "bias of one row": lambda x: x + WEIGHT.view(1, 6) * WEIGHT.view(1, 1, 6),
    "positions": lambda x: x + ROWS,
    "positions of one sample": lambda x: torch.add(x, ROWS[None], alpha=2),
    "a whole tensor": lambda x: x * torch.arange(96.0).view(SHAPE),
    "its mean": lambda x: x - x.mean(-1, keepdim=True) + x.sum(dim=2, keepdim=True),
    "a choice": lambda x: torch.where(torch.ones(8, 1, dtype=torch.bool), x, WEIGHT),
    "kinds": lambda x: x.double().type_as(x).contiguous().clone(),
}
OTHERWISE: dict[str, Callable[[Tensor], Any]] = {
    "along the tokens": lambda x: x.cumsum(1) + x.mean(1, keepdim=True),
    "without the dimension": lambda x: x.mean(-1),
    "of two dimensions": lambda x: F.layer_norm(x, (8, 6), ROWS),
    "a product": lambda x: F.linear(x, ROWS),
    "views": lambda x: x.view(2, 8, 2, 3).transpose(1, 2).flatten(1) * 2,
    "a list": lambda x: torch.cat([x, x[:, :1]], dim=1),
    "more dimensions": lambda x: x * torch.ones(3, 2, 8, 6),
    "tokens last": lambda x: x.mT * torch.arange(8.0),
    "attention": lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x),
    "both": lambda x: F.gelu(x) + x,
}
OPERATIONS = BY_TOKEN | OTHERWISE


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_values_and_the_gradients_of_the_whole(
    name: str, members: int
) -> None:
    run, plain = OPERATIONS[name], whole().requires_grad_()
    expected = run(plain)
    outer = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    used = [plain, WEIGHT, ROWS]
    gradients = torch.autograd.grad(expected, used, outer, allow_unused=True)

    def body(group: TensorGroup) -> tuple[bool, Tensor, list[Tensor | None]]:
        leaf = whole().requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            result = run(tokens_of(group, leaf))
            is_divided = isinstance(result, TokenTensor)
            total = whole_in(result)
            found = torch.autograd.grad(total, [leaf, WEIGHT, ROWS], outer, allow_unused=True)
        return is_divided, total.detach(), list(found)

    results = on_members(members, body)
    assert {is_divided for is_divided, _, _ in results} == {name in BY_TOKEN or name == "both"}
    for _, total, _ in results:
        torch.testing.assert_close(total, expected.detach())
    of_leaves = [found[0] for _, _, found in results]
    # Each member has the gradient of its own tokens of the leaf.
    torch.testing.assert_close(sum(of_leaves), gradients[0])
    for _, _, (_, *of_weights) in results:
        for one, other in zip(of_weights, gradients[1:], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("members", [2, 4])
def test_a_scattered_sum_has_the_bits_of_the_sum(members: int) -> None:
    def body(group: TensorGroup) -> tuple[Tensor, Tensor]:
        parts = [
            torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 + chunk))
            for chunk in group.own
        ]
        scattered = joined(group, parts)
        assert isinstance(scattered, TokenTensor)
        return group.fold(parts), scattered.whole()

    [first, *_] = results = on_members(members, body)
    alone_total, _ = alone(body)
    for total, gathered in results:
        assert torch.equal(total, gathered)
        assert torch.equal(total, first[0])
        assert torch.equal(total, alone_total)


def test_tokens_that_give_no_equal_chunks_are_summed_on_all_members() -> None:
    def body(group: TensorGroup) -> list[type]:
        shapes = ((2, 6, 3), (2, 0, 3), (8, 3), (2, 8, 3))
        return [type(joined(group, [torch.ones(s) for _ in group.own])) for s in shapes]

    assert alone(body) == [Tensor, Tensor, Tensor, TokenTensor]


def test_its_shape_is_that_of_the_whole_and_its_kind_that_of_the_chunks() -> None:
    def body(group: TensorGroup) -> None:
        x = tokens_of(group, whole().bfloat16().requires_grad_())

        assert x.shape == x.size() == SHAPE
        assert (x.dim(), x.ndim, x.size(1), len(x), x.numel()) == (3, 3, 8, 2, 96)
        assert (x.dtype, x.device.type, x.requires_grad) == (torch.bfloat16, "cpu", True)
        assert x.is_floating_point()
        assert x.new_zeros(3).dtype == torch.bfloat16
        assert not x._known

    alone(body)


def test_the_whole_is_gathered_once_without_and_once_with_a_graph() -> None:
    def body(group: TensorGroup) -> None:
        x = tokens_of(group, whole().requires_grad_())
        with torch.no_grad():
            assert x.whole() is x.whole()
            assert not x.whole().requires_grad
        assert x.whole().requires_grad
        assert x.whole() is x.whole()

    alone(body)


def test_dropout_draws_the_numbers_of_the_whole() -> None:
    def dropped(run: Callable[[], Tensor]) -> Tensor:
        torch.manual_seed(5)
        return run()

    def body(group: TensorGroup) -> list[Tensor]:
        x = tokens_of(group, whole())
        found = [dropped(lambda: whole_in(F.dropout(x, 0.5))), F.dropout(x, 0.5, False)]
        found.append(nn.Dropout(0.0)(x))
        assert all(isinstance(each, TokenTensor) for each in found[1:])
        return [whole_in(each) for each in found]

    expected = dropped(lambda: F.dropout(whole(), 0.5))
    found, *kept = alone(body)
    assert torch.equal(found, expected)
    assert all(torch.equal(each, whole()) for each in kept)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, outer: Tensor) -> Tensor:
        return outer * 2


class DoubleOfTheWhole(Double):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view(-1).view(x.shape) * 2


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "tanh_": lambda x: x.tanh_(),
    "add_": lambda x: x.add_(torch.ones(3, 2, 8, 6)),
    "zero_": lambda x: x.zero_(),
    "__setitem__": lambda x: x.__setitem__(0, 1),
    "register_hook": lambda x: x.register_hook(lambda g: g),
    "retain_grad": lambda x: x.retain_grad(),
    "requires_grad_": lambda x: x.requires_grad_(),
    "__set__": lambda x: setattr(x, "grad", None),
    "grad": lambda x: torch.autograd.grad((x * 2).whole().sum(), x),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_writes_or_watches_is_refused_by_name(name: str) -> None:
    def body(group: TensorGroup) -> None:
        with pytest.raises(ConfigError, match=f"^layout.g_tensor: (a )?{name} .*; (use|leave)"):
            REFUSED[name](tokens_of(group, whole().requires_grad_()))

    alone(body)


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1).sub_(WEIGHT.detach()),
    "operators": lambda x: x.__imul__(2).__iadd__(ROWS.detach()).__itruediv__(3).__isub__(1),
    "whole": lambda x: x.mul_(torch.arange(96.0).view(SHAPE)),
    "dropout": lambda x: F.dropout(x, 0.5, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_entries_are_written_in_place(name: str) -> None:
    def body(group: TensorGroup) -> Tensor:
        leaf = whole().requires_grad_()
        given = tokens_of(group, leaf) * 1
        alias = given.contiguous()
        before, _ = given.whole(), alias.whole()
        torch.manual_seed(5)
        assert IN_PLACE[name](given) is given
        assert torch.equal(whole_in(given), whole_in(alias))
        assert not torch.equal(before, whole_in(given))
        whole_in(given).square().sum().backward()
        return torch.stack([whole_in(given), leaf.grad])  # type: ignore[list-item]

    leaf = whole().requires_grad_()
    torch.manual_seed(5)
    expected = IN_PLACE[name](leaf * 1)
    expected.square().sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(alone(body), torch.stack([expected, leaf.grad]))


def test_a_whole_tensor_may_be_written_with_tokens() -> None:
    def body(group: TensorGroup) -> Tensor:
        x, target = tokens_of(group, whole()), torch.zeros(SHAPE)
        target.add_(x)
        target += x
        return target

    assert torch.equal(alone(body), 2 * whole())


@pytest.mark.parametrize("use", [whole_in, lambda x: x + 1, lambda x: x.view(-1)])
@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (Double, ConfigError, r"an autograd\.Function gets activations of which each member has"),
        (DoubleOfTheWhole, RuntimeError, "expected device meta but got cpu"),
    ],
)
def test_a_function_that_autograd_does_not_see_through_is_refused(
    kind: Any, error: type[Exception], told: str, use: Callable[[Tensor], Tensor]
) -> None:
    def body(group: TensorGroup) -> None:
        x = tokens_of(group, whole().requires_grad_())
        apply: Callable[..., Tensor] = kind.apply
        apply(x.view(x.shape)).sum().backward()
        with (
            torch.autograd.set_multithreading_enabled(False),
            pytest.raises(error, match=told),
        ):
            use(apply(x)).sum().backward()

    alone(body)


def test_what_torch_saves_of_it_for_a_nested_recomputation_is_on_no_device() -> None:
    """torch makes a plain tensor of it, which must not be read."""
    linear = nn.Linear(6, 6)

    def body(group: TensorGroup) -> None:
        def outer(x: Tensor) -> Tensor:
            return recomputed(linear, tokens_of(group, x), use_reentrant=False).sum()  # type: ignore[no-any-return]

        with torch.autograd.set_multithreading_enabled(False):
            leaf = whole().requires_grad_()
            outer(leaf).backward()
            total = recomputed(outer, leaf, use_reentrant=False)
            with pytest.raises(RuntimeError, match="meta"):
                total.backward()

    alone(body)


# -- from layer to layer ----------------------------------------------------------------


class Outputs(NamedTuple):
    hidden: Tensor
    number: Tensor


class Block(nn.Module):
    """Sums over chunks what it gets, and adds its bias."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self.group, self.bias = group, nn.Parameter(torch.arange(6.0))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor, number: Tensor) -> Outputs:
        each = x.for_chunks() if isinstance(x, TokenTensor) else spread(self.group, x)
        total = joined(self.group, [part / CHUNKS for part in each])
        return Outputs(total * self.frozen + self.bias + self.bias, number)


@pytest.mark.parametrize("members", [1, 2, 4])
def test_tokens_travel_between_layers_and_the_last_one_returns_the_whole(members: int) -> None:
    def body(group: TensorGroup) -> tuple[list[Tensor], int, int]:
        number = torch.tensor(3)
        with torch.autograd.set_multithreading_enabled(False):
            modules = [Block(group) for _ in range(3)]
            flow: Any = (whole(), number)
            shapes = []
            for place, module in enumerate(modules):
                parameters = list(module.parameters())
                flow = call_layer(group, module, parameters, flow, is_last=place == 2)
                assert flow[1] is number
                assert not group.copies
                shapes.append(flow[0].shape)
            own = CHUNKS // members
            assert shapes[:2] == [(1, 1, own, 2, 8 // CHUNKS, 6)] * 2
            assert shapes[2] == SHAPE
            forward = group.bytes_sent
            flow[0].sum().backward()
        found = [flow[0].detach(), *(module.bias.grad for module in modules)]
        return found, forward, group.fixed_bytes

    expected = whole()
    for _ in range(3):
        expected = expected + 2 * torch.arange(6.0)
    for found, forward, fixed in on_members(members, body):
        torch.testing.assert_close(found[0], expected)
        assert all(torch.equal(gradient, torch.full((6,), 32.0)) for gradient in found[1:])
        # Three sums and what is gathered of them, in fp32; and three gradients of a vector.
        assert forward == 3 * 2 * whole().nbytes * (members - 1) // members
        assert fixed == 3 * 2 * 6 * 4 * (members - 1) // members


def test_a_layer_that_fails_leaves_no_copies_of_parameters() -> None:
    def body(group: TensorGroup) -> None:
        def fail(_: Tensor) -> Tensor:
            raise ValueError

        with pytest.raises(ValueError):
            call_layer(group, fail, [WEIGHT], (whole(),), is_last=False)
        assert not group.copies

    alone(body)


def test_a_tensor_of_the_shape_that_travels_is_refused() -> None:
    def body(group: TensorGroup) -> None:
        def widen(x: Tensor) -> list[Tensor]:
            return [x.view(1, 1, 1, *SHAPE)]

        with pytest.raises(ConfigError, match="a layer returns a tensor of 6 dimensions"):
            call_layer(group, widen, [], (whole(),), is_last=False)

    alone(body)


def test_a_row_split_takes_no_tokens() -> None:
    """What lies between a column and a row split has features of some chunks, not some tokens."""

    def body(group: TensorGroup) -> None:
        linear = nn.Linear(24, 6, device="meta")
        row = Row(linear, Cut((6, 24), 1, 1, CHUNKS), group, Split("row"), divides=True)
        with pytest.raises(ConfigError, match="a row split of 24 features in 4 chunks gets"):
            row(tokens_of(group, whole().requires_grad_()))

    on_members(CHUNKS, body)


def test_one_of_several_chunks_of_an_input_is_not_written_to() -> None:
    def body(group: TensorGroup) -> None:
        flow = torch.ones(1, 1, len(group.own), 2, 2, 6).requires_grad_() * 1
        if len(group.own) > 1:
            with pytest.raises(ConfigError, match="mul_ writes into activations"):
                call_layer(group, lambda x: x.mul_(2), [], (flow,), is_last=False)
        else:
            call_layer(group, lambda x: x.mul_(2), [], (flow,), is_last=False)
            assert torch.equal(flow, torch.full(flow.shape, 2.0))

    for members in (1, 4):
        on_members(members, body)


class Wrapped(Tensor):
    """A tensor of another class, whose operations are torch's own."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_other_classes_of_tensors_have_tokens_unless_they_have_rules_of_their_own() -> None:
    def body(group: TensorGroup) -> None:
        x, ones = tokens_of(group, whole()), torch.full(SHAPE, 2.0)
        assert isinstance(x * ones.as_subclass(Wrapped), TokenTensor)

        features = chunked([ones, 2 * ones])
        for product in (x * features, features * x):
            assert isinstance(product, ChunkedTensor)
            for chunk, factor in zip(product.chunks, (2, 4), strict=True):
                assert type(chunk) is Tensor, "features of one chunk are those of all tokens"
                assert torch.equal(chunk, factor * whole())

    alone(body)


def test_chunks_that_arrive_are_aligned_as_one_alone_is() -> None:
    def body(group: TensorGroup) -> None:
        flow = torch.arange(4.0 * 2 * 1 * 5).view(1, 1, 4, 2, 1, 5)

        def look(x: Any) -> Tensor:
            assert all(chunk.data_ptr() % ALIGNMENT == 0 for chunk in x.chunks)
            assert torch.equal(torch.stack(x.chunks), flow[0, 0])
            return torch.zeros(1)

        call_layer(group, look, [], (flow,), is_last=False)

    alone(body)


def test_what_a_sum_gives_can_be_written_to() -> None:
    def body(group: TensorGroup) -> Tensor:
        leaf = whole().requires_grad_()
        total = joined(group, [part / CHUNKS for part in spread(group, leaf)])
        total.mul_(3)
        whole_in(total).sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.full(SHAPE, 3.0))
        return whole_in(total)  # type: ignore[no-any-return]

    torch.testing.assert_close(alone(body), 3 * whole())


def test_a_result_that_is_given_is_written_as_a_whole() -> None:
    def body(group: TensorGroup) -> Tensor:
        given = torch.zeros(2, 8, 1)
        torch.mean(tokens_of(group, whole()), -1, True, out=given)
        return given

    torch.testing.assert_close(alone(body), whole().mean(-1, keepdim=True))


def test_a_chunk_that_is_not_used_adds_nothing_to_the_gradient() -> None:
    def body(group: TensorGroup) -> Tensor | None:
        leaf = whole().requires_grad_()
        spread(group, leaf)[0].sum().backward()
        return leaf.grad

    assert torch.equal(alone(body), torch.ones(SHAPE))
