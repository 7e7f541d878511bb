"""Linear weights with sparse products, in backwards that are whole or split."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.splittable_weights import WeightSplit, is_plain
from axsparse.pipeline.stage import Key, Stage
from axsparse.runtime.errors import ConfigError

KEY = Key(0, 0)
SIZE = 12


class Products:
    """Takes every product, with torch's bits, and keeps the sum of whole weight gradients."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self.total = torch.zeros_like(weight)
        self.calls = self.outputs = self.input_gradients = 0
        self.is_wanted = self.multiplies = self.accumulates = True
        self.fewest = 0

    def takes(self, rows: Tensor, bias: Tensor | None) -> bool:
        return len(rows) >= self.fewest

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        self.outputs += 1
        return torch.nn.functional.linear(rows, self.weight, bias)

    def input_gradient(self, outer: Tensor) -> Tensor:
        self.input_gradients += 1
        return outer.mm(self.weight)

    def accumulate(self, rows: Tensor, outer: Tensor) -> bool:
        if not self.accumulates:
            return False
        self.total += outer.t().mm(rows)
        self.calls += 1
        return True


def staged(
    module: nn.Module,
    *,
    is_split: bool = False,
    is_recomputed: bool = False,
    multiplies: bool = True,
) -> tuple[Stage, dict[str, Products]]:
    """A stage of one layer with sparse products of each of its matrices."""
    runner = LayerRunner("layer", module, is_random=False, is_recomputed=is_recomputed)
    sparse = {
        name: Products(weight) for name, weight in module.named_parameters() if weight.dim() == 2
    }
    for products in sparse.values():
        products.multiplies = multiplies
    parameters = dict(module.named_parameters())
    of_weights = {parameters[name]: products for name, products in sparse.items()}
    split = WeightSplit([("layer", module)], of_weights, is_split=is_split)
    stage = Stage([runner], loss=None, metrics={}, input_dtype=None, seed=0, split=split)
    return stage, sparse


def run(stage: Stage, x: Tensor, microbatch: int = 0, *, is_split: bool = False) -> Tensor | None:
    """Train on one microbatch; the gradient of its input."""
    x = x.detach().requires_grad_(x.requires_grad)
    (y,) = stage.forward(microbatch, (x,), KEY, None, 1.0)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    stage.backward(microbatch, [gradient], 1.0)
    if is_split:
        stage.weight_gradients(microbatch)
    return x.grad


def by_torch(module: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """The gradients of weights and input that torch makes by itself."""
    other = copy.deepcopy(module)
    runner = LayerRunner("layer", other, is_random=False, is_recomputed=False)
    stage = Stage([runner], loss=None, metrics={}, input_dtype=None, seed=0)
    of_input = run(stage, x)
    return {name: p.grad for name, p in other.named_parameters() if p.grad is not None}, of_input


def assert_trained(
    module: nn.Module, sparse: dict[str, Products], expected: dict[str, Tensor]
) -> None:
    """What sparse products have and what parameters have are, together, the gradients of torch."""
    for name, parameter in module.named_parameters():
        if name in sparse and sparse[name].calls:
            assert parameter.grad is None
            assert torch.equal(sparse[name].total, expected[name]), name
        else:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected[name]), name


class Inner(nn.Module):
    """A linear layer, and what a forward does with it besides calling it once."""

    def __init__(self, way: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self._way = way

    def forward(self, x: Tensor) -> Tensor:
        return self._way(self.inner, x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, 20),
    "no bias": lambda: nn.Linear(SIZE, 20, bias=False),
    "mlp": lambda: nn.Sequential(
        nn.Linear(SIZE, 20), nn.ReLU(inplace=True), nn.LayerNorm(20), nn.Linear(20, 8)
    ),
    "checkpoint of its own": lambda: Inner(
        lambda inner, x: checkpoint(inner, x, use_reentrant=False)
    ),
    "used without a gradient, too": lambda: Inner(
        lambda inner, x: inner(x) * inner.weight.detach().norm() + inner.weight.shape[0]
    ),
}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("has_gradient", [True, False], ids=["input trains", "input does not"])
@pytest.mark.parametrize("multiplies", [True, False], ids=["all", "weight gradients"])
@pytest.mark.parametrize("name", MODULES)
def test_sparse_products_take_the_factors_of_every_microbatch(
    name: str, multiplies: bool, has_gradient: bool, is_recomputed: bool, is_split: bool
) -> None:
    torch.manual_seed(2)
    module = MODULES[name]()
    x = torch.randn(3, 5, SIZE, requires_grad=has_gradient)
    expected, of_input = by_torch(module, x)
    stage, sparse = staged(
        module, is_split=is_split, is_recomputed=is_recomputed, multiplies=multiplies
    )

    for microbatch in range(2):
        module.zero_grad()
        for products in sparse.values():
            products.total.zero_()
        found = run(stage, x, microbatch, is_split=is_split)

        assert all(products.calls == microbatch + 1 for products in sparse.values())
        assert_trained(module, sparse, expected)
        assert (found is None) == (of_input is None)
        assert found is None or of_input is None or torch.equal(found, of_input)
        assert (stage.held, stage.late_bytes, stage.whole) == (0, 0, {})
    passes = 2 * (1 + (is_recomputed or name == "checkpoint of its own"))
    for number, products in enumerate(sparse.values()):
        has_node = has_gradient or number > 0
        assert products.outputs == multiplies * passes
        assert products.input_gradients == 2 * (multiplies and has_node)


@pytest.mark.parametrize("fewest", [0, 4], ids=["taken", "too few"])
def test_both_passes_of_a_reentrant_checkpoint_are_alike(fewest: int) -> None:
    """The first runs without gradients, and its output is the one that the loss sees."""
    module = Inner(lambda inner, x: checkpoint(inner, x, use_reentrant=True))
    x = torch.randn(3, SIZE, requires_grad=True)
    expected, of_input = by_torch(module, x)
    stage, sparse = staged(module)
    sparse["inner.weight"].fewest = fewest

    found = run(stage, x)

    assert sparse["inner.weight"].outputs == (2 if fewest <= 3 else 0)
    assert sparse["inner.weight"].calls == 1
    assert_trained(module, sparse, expected)
    assert found is not None
    assert of_input is not None
    assert torch.equal(found, of_input)


def test_a_split_backward_accumulates_with_the_weight_gradients() -> None:
    module = nn.Linear(SIZE, 20)
    stage, sparse = staged(module, is_split=True)

    run(stage, torch.randn(3, SIZE))
    assert sparse["weight"].calls == 0
    assert stage.late_bytes > 0
    stage.weight_gradients(0)
    assert sparse["weight"].calls == 1


WAYS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "also otherwise": lambda inner, x: inner(x) + inner.weight.sum(),
    "otherwise first": lambda inner, x: inner(x + (inner.weight**2).sum()),
    "twice": lambda inner, x: inner(inner(x)),
    "not contiguous": lambda inner, x: inner(x.transpose(0, 1)).transpose(0, 1),
    "by a view": lambda inner, x: x @ inner.weight.t() + inner.bias,
    "in a list": lambda inner, x: inner(x + torch.cat([inner.weight, inner.bias[None]]).sum()),
}


PRODUCTS = {
    "also otherwise": 1,
    "otherwise first": 1,
    "twice": 2,
    "not contiguous": 0,
    "by a view": 0,
    "in a list": 1,
}
"""How many products of a forward are taken."""


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_used_in_another_way_have_torch_s_gradients(
    way: str, is_split: bool
) -> None:
    torch.manual_seed(3)
    module = Inner(WAYS[way])
    x = torch.randn(3, 3, SIZE, requires_grad=True)
    expected, of_input = by_torch(module, x)
    hooked: list[str] = []
    module.inner.weight.register_post_accumulate_grad_hook(lambda _: hooked.append("weight"))
    stage, sparse = staged(module, is_split=is_split)

    for microbatch in range(2):
        module.zero_grad()
        found = run(stage, x, microbatch, is_split=is_split)

        assert hooked == ["weight"] * (microbatch + 1), "one gradient a microbatch"
        assert_trained(module, sparse, expected)
        assert found is not None
        assert of_input is not None
        assert torch.equal(found, of_input)
    assert sparse["inner.weight"].calls == 0
    assert sparse["inner.weight"].outputs == 2 * PRODUCTS[way]


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_a_weight_that_is_frozen_later_has_no_gradient(is_split: bool) -> None:
    module = nn.Linear(SIZE, 20)
    stage, sparse = staged(module, is_split=is_split)
    run(stage, torch.randn(3, SIZE), is_split=is_split)
    assert sparse["weight"].calls == 1

    module.weight.requires_grad_(False)
    run(stage, torch.randn(3, SIZE), 1, is_split=is_split)
    module.weight.requires_grad_(True)
    run(stage, torch.randn(3, SIZE), 2, is_split=is_split)

    assert sparse["weight"].calls == 2


def test_a_weight_that_is_frozen_for_one_call_has_the_gradient_of_the_others() -> None:
    def way(inner: nn.Linear, x: Tensor) -> Tensor:
        inner.weight.requires_grad_(False)
        y = inner(x).tanh()
        inner.weight.requires_grad_(True)
        return torch.as_tensor(inner(y))

    module = Inner(way)
    x = torch.randn(3, SIZE, requires_grad=True)
    expected, _ = by_torch(module, x)
    stage, sparse = staged(module)

    run(stage, x)

    assert_trained(module, sparse, expected)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_an_input_without_rows_has_an_output_without_rows(is_split: bool) -> None:
    module = Inner(lambda inner, x: inner(x[:0].view(0, 2, SIZE)))
    stage, sparse = staged(module, is_split=is_split)

    run(stage, torch.randn(4, SIZE, requires_grad=True), is_split=is_split)

    assert sparse["inner.weight"].total.count_nonzero() == 0


def test_layers_of_torch_s_modules_alone_are_plain() -> None:
    hooked, overridden = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    hooked.register_full_backward_hook(lambda module, given, got: None)
    vars(overridden)["forward"] = torch.relu

    assert is_plain(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()))
    assert not is_plain(nn.Sequential(Inner(lambda inner, x: x)))
    assert not is_plain(nn.Sequential(hooked))
    assert not is_plain(nn.Sequential(overridden))


def slope(inner: nn.Linear, x: Tensor) -> Tensor:
    """The gradient of an activation alone."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(inner(leaf).square().sum(), leaf)
    return found


NESTED: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "by itself": lambda inner, x: slope(inner, x) + inner(x),
    "in a checkpoint": lambda inner, x: checkpoint(
        lambda y: slope(inner, y) + inner(y), x, use_reentrant=False
    ),
    "in a reentrant checkpoint": lambda inner, x: checkpoint(
        lambda y: slope(inner, y) + inner(y), x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", NESTED)
def test_a_backward_for_an_activation_alone_leaves_nothing(
    way: str, is_recomputed: bool, is_split: bool
) -> None:
    torch.manual_seed(3)
    module = Inner(NESTED[way])
    x = torch.randn(3, 3, SIZE, requires_grad=True)
    expected, of_input = by_torch(module, x)
    stage, sparse = staged(module, is_split=is_split, is_recomputed=is_recomputed)

    for microbatch in range(2):
        module.zero_grad()
        found = run(stage, x, microbatch, is_split=is_split)

        assert_trained(module, sparse, expected)
        assert found is not None
        assert of_input is not None
        assert torch.equal(found, of_input)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_whole_gradients_are_made_where_they_are_wanted(is_split: bool) -> None:
    module = nn.Sequential(nn.Linear(SIZE, 20), nn.Tanh(), nn.Linear(20, SIZE))
    x = torch.randn(3, SIZE, requires_grad=True)
    expected, _ = by_torch(module, x)
    stage, sparse = staged(module, is_split=is_split)
    sparse["0.weight"].accumulates = False

    run(stage, x, is_split=is_split)

    assert_trained(module, sparse, expected)
    assert [products.calls for products in sparse.values()] == [0, 1]


def test_a_weight_that_is_not_pruned_enough_stays_where_it_is() -> None:
    module = nn.Linear(SIZE, 20)
    stage, sparse = staged(module)
    split = stage._split
    assert split is not None
    sparse["weight"].is_wanted = False
    run(stage, torch.randn(3, SIZE))
    assert not split.plan
    assert sparse["weight"].calls == 0

    module.zero_grad()
    sparse["weight"].is_wanted = True
    run(stage, torch.randn(3, SIZE))

    assert len(split.plan) == 1
    assert sparse["weight"].calls == 1


def test_products_are_sparse_as_long_as_they_are_wanted() -> None:
    module = nn.Linear(SIZE, 20)
    stage, sparse = staged(module)
    products = sparse["weight"]
    run(stage, torch.randn(3, SIZE))

    products.multiplies = False
    run(stage, torch.randn(3, SIZE))
    assert (products.outputs, products.calls) == (1, 2)

    products.multiplies = True
    run(stage, torch.randn(3, SIZE))
    assert (products.outputs, products.calls) == (2, 3)


def test_a_weight_that_is_not_pruned_enough_yet_is_split_as_others_are() -> None:
    module = nn.Linear(SIZE, 20)
    stage, sparse = staged(module, is_split=True)
    sparse["weight"].is_wanted = sparse["weight"].multiplies = False
    x = torch.randn(3, SIZE)
    expected, _ = by_torch(module, x)

    run(stage, x)
    assert module.weight.grad is None
    stage.weight_gradients(0)

    assert_trained(module, sparse, expected)
    assert sparse["weight"].outputs == 0


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_hooks_that_come_later_get_whole_gradients(kind: str) -> None:
    module = nn.Linear(SIZE, 20)
    stage, sparse = staged(module)
    x = torch.randn(3, SIZE)
    expected, _ = by_torch(module, x)
    seen: list[Tensor] = []
    if kind == "gradient":
        module.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    else:
        module.weight.register_post_accumulate_grad_hook(
            lambda weight: seen.append(torch.as_tensor(weight.grad).clone())
        )

    run(stage, x)

    [gradient] = seen
    assert torch.equal(gradient, expected["weight"])
    assert sparse["weight"].calls == 0


@pytest.mark.parametrize("first", ["call", "reference"])
def test_a_gradient_that_passes_the_stand_in_by_is_refused(first: str) -> None:
    hidden: list[Tensor] = []

    def way(inner: nn.Linear, x: Tensor) -> Tensor:
        if first == "call":  # whose backward then comes last
            return torch.mul(inner(x), hidden[0].sum())
        return torch.as_tensor(inner(x + hidden[0].sum()))

    module = Inner(way)
    hidden.append(module.inner.weight)
    stage, _ = staged(module)

    with pytest.raises(ConfigError, match=r"inner\.weight: it is used outside .*sparse_products"):
        run(stage, torch.randn(3, SIZE, requires_grad=True))


def test_a_part_that_was_not_seen_to_come_is_refused() -> None:
    """Only the backward shows what a function takes out of a mapping; a products has taken what it
    thought was all."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(_: object, *tensors: Tensor) -> Tensor:
            return tensors[0].sum()

        @staticmethod
        def backward(_: object, *gradients: Tensor) -> Tensor:
            return gradients[0].expand(SIZE, SIZE)

    apply: Callable[..., Tensor] = Nested.apply
    stage, _ = staged(Inner(lambda inner, x: inner(x + apply(inner.weight))))

    with pytest.raises(ConfigError, match=r"inner\.weight: it is used outside"):
        run(stage, torch.randn(3, SIZE, requires_grad=True))


class Subclass(nn.Linear):
    pass


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    module[1].weight = module[0].weight
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a class of one's own": lambda: Subclass(SIZE, SIZE),
    "an embedding": lambda: nn.Sequential(nn.Flatten(0), nn.Embedding(SIZE, SIZE)),
    "tied": tied,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
    "compiled": lambda: nn.Sequential(compiled(nn.Linear(SIZE, SIZE))),
    "compiled around": lambda: compiled(nn.Sequential(nn.Linear(SIZE, SIZE))),
}


def compiled(module: nn.Module) -> nn.Module:
    """A module that torch.compile calls; nothing is compiled yet."""
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("name", OTHERS)
def test_only_plain_linear_modules_have_sparse_products(name: str) -> None:
    stage, _ = staged(OTHERS[name]())

    assert stage._split is not None
    assert stage._split._sparse == ()


def test_an_input_is_free_once_its_gradient_is_accumulated() -> None:
    """Not only at the end of the backward, as the graph is."""
    module = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    stage, sparse = staged(module)
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    assert stage._split is not None
    for slot in stage._split._sparse:
        products = slot.stand_in.original.sparse
        assert isinstance(products, Products)
        slot.stand_in.original.sparse = Watching(products, given, alive)

    run(stage, torch.randn(4, SIZE, requires_grad=True))

    assert alive == [0, 0, 0]
    assert all(products.calls == 1 for products in sparse.values())


class Watching(Products):
    """Notes how many inputs that were given before are still there."""

    def __init__(self, inner: Products, given: list[weakref.ref[Tensor]], alive: list[int]) -> None:
        super().__init__(inner.weight)
        self._inner, self._given, self._alive = inner, given, alive

    def accumulate(self, rows: Tensor, outer: Tensor) -> bool:
        self._alive.append(sum(each() is not None for each in self._given))
        self._given.append(weakref.ref(rows))
        return self._inner.accumulate(rows, outer)
