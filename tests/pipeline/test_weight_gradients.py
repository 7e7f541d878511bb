"""Weight gradients that are deferred or computed sparsely equal torch's own backward.

One table of modules, each with a way of using its weights; one reference, plain autograd; four ways
of taking the gradients.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.allocated import peak_of_torch
from support.sums import Sums
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.stage import Key, Stage
from axsparse.pipeline.weight_gradients import StageProducts

SIZE = 12
MICROBATCHES = 3


class Played:
    """A stage of one layer that trains on given microbatches."""

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...] = (3, 5, SIZE),
        *,
        is_split: bool = False,
        is_sparse: bool = False,
        is_recomputed: bool = False,
        is_dropping: bool = False,
        needs_input: bool = True,
        dtype: torch.dtype = torch.float32,
        deferring: Set[nn.Module] = frozenset(),
    ) -> None:
        self.module = module
        self.sums = Sums(module, is_sparse=is_sparse, is_dropping=is_dropping)
        self.products = StageProducts(
            [module], self.sums.collector, is_split=is_split, deferring=deferring
        )
        self.stage = Stage(
            [LayerRunner("layer", module, is_recomputed=is_recomputed)],
            loss=None,
            metrics={},
            input_dtype=None,
            seed=0,
            products=self.products,
        )
        self.inputs: list[Tensor] = []
        self._is_split = is_split
        self._drawn = partial(torch.randn, shape, requires_grad=needs_input)
        self._dtype = dtype

    def forward(self, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(microbatch)
        x = self._drawn(generator=generator).detach().to(self._dtype)
        self.inputs.append(x.requires_grad_(self._drawn.keywords["requires_grad"]))
        (y,) = self.stage.forward(microbatch, (self.inputs[-1],), Key(0, 0), None, 1.0)
        return y

    def backward(self, microbatch: int, y: Tensor) -> None:
        gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + microbatch))
        self.stage.backward(microbatch, [gradient.to(y.dtype)], 1.0)

    def play(self) -> Played:
        """All microbatches; the weight gradients of each wait for the next one's backward."""
        for microbatch in range(MICROBATCHES):
            self.backward(microbatch, self.forward(microbatch))
            if self._is_split and microbatch:
                self.stage.weight_gradients(microbatch - 1)
        if self._is_split:
            self.stage.weight_gradients(MICROBATCHES - 1)
        return self

    @property
    def deferred_bytes(self) -> int:
        """Bytes of the inputs and output gradients that wait; each storage counts once."""
        assert self.products.deferred is not None
        waiting = itertools.chain(*(m.each for m in self.products.deferred._waiting.values()))
        storages = (saved.untyped_storage() for each in waiting for saved in each.saved)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def names(self, weights: Iterable[nn.Parameter]) -> list[str]:
        known = dict(self.module.named_parameters())
        return [name for name, weight in known.items() if any(weight is one for one in weights)]


def assert_trained_alike(one: Played, other: Played, *, is_rounded: bool = False) -> None:
    parameters = [dict(each.module.named_parameters()) for each in (one, other)]
    for name, weight in parameters[0].items():
        mine = one.sums.totals.get(weight)
        yours = other.sums.totals.get(parameters[1][name])
        assert (mine is None) == (yours is None), name
        if mine is not None and yours is not None:
            assert mine.dtype == yours.dtype
            assert is_rounded or torch.equal(mine, yours), name
            torch.testing.assert_close(mine, yours)
    for one_input, other_input in zip(one.inputs, other.inputs, strict=True):
        assert (one_input.grad is None) == (other_input.grad is None)
        if one_input.grad is not None and other_input.grad is not None:
            assert torch.equal(one_input.grad, other_input.grad)


def by_torch(make: Callable[[], nn.Module], shape: tuple[int, ...], **given: Any) -> Played:
    """The gradients of plain autograd."""
    torch.manual_seed(4)
    module = make().to(given.get("dtype", torch.float32))
    played = Played(module, shape, **given)
    assert len(played.products) == 0, "nothing takes part in it"
    return played.play()


# -- the table --------------------------------------------------------------------------


class Uses(nn.Module):
    """A linear layer, and what a forward does with it."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], outputs: int = SIZE) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, outputs)
        self.calls = 0
        self._way = way

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self._way(self, x)


class Attention(nn.Module):
    """Three products of one input, whose output gradients are strided."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (w(x).view(*x.shape[:2], 3, 4).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class LowRank(nn.Module):
    """A frozen layer with an update of low rank, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.down, self.up = nn.Linear(SIZE, 3, bias=False), nn.Linear(3, SIZE, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.frozen(x) + self.up(self.down(x)) / 2


class Overridden(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 2, self.weight) - self.bias


class Inherited(nn.Linear):
    """A custom class with torch's forward."""


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(SIZE, 3, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, need_weights=False)[0]


def frozen_bias(module: nn.Linear | nn.Conv2d) -> nn.Module:
    assert module.bias is not None
    module.bias.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    module[2].weight = module[0].weight
    return module


def slope(inner: nn.Linear, x: Tensor, *, again: bool = False) -> Tensor:
    """The gradient of an activation alone; `again` says that it is differentiated itself."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        score = inner(leaf).square().sum()
        (gradient,) = torch.autograd.grad(score, leaf, create_graph=again)
    return gradient


def hooked() -> nn.Module:
    module = nn.Linear(SIZE, SIZE)
    module.weight.register_hook(lambda gradient: gradient * 2)
    return module


def later(way: Callable[[Uses, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A way that a module takes from its second microbatch on."""
    return lambda module, x: module.inner(x) if module.calls < 2 else way(module, x)


ALL = ["weight"]
INNER = ["inner.weight"]
S3 = (3, 5, SIZE)
"""Samples, positions and features."""
Way = Callable[[Any, Tensor], Tensor]
USED: dict[str, tuple[Way, tuple[int, ...], list[str]]] = {
    "twice": (lambda m, x: m.inner(m.inner(x)), S3, INNER),
    "penalty": (lambda m, x: m.inner(x) + m.inner.weight.sum(), S3, INNER),
    "twice and a penalty": (lambda m, x: m.inner(m.inner(x) + m.inner.weight.mean()), S3, INNER),
    "raw product": (lambda m, x: F.linear(x, m.inner.weight), S3, []),
    "gradient penalty": (lambda m, x: m.inner(x) + slope(m.inner, x, again=True), S3, INNER),
    "slope of an activation": (lambda m, x: m.inner(x) + slope(m.inner, x), S3, INNER),
    "transposed input": (lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1), S3, []),
    "penalty from the second microbatch on": (
        later(lambda m, x: m.inner(x) + m.inner.weight.sum()),
        *(S3, INNER),
    ),
    "unused from the second microbatch on": (later(lambda m, x: x * m.inner.bias), S3, INNER),
    "checkpoint of its own": (
        *(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), (7, SIZE), INNER),
    ),
}
"""Forwards with a linear layer, the shape of its input, and the parameters that split backwards
take for W."""
BOTH = ["weight", "bias"]
IMAGE = (4, 6, 9, 9)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "2-d": (lambda: nn.Linear(SIZE, 20), (7, SIZE), ALL),
    "3-d": (lambda: nn.Linear(SIZE, 20), S3, ALL),
    "4-d": (lambda: nn.Linear(SIZE, 20), (3, 2, 5, SIZE), []),
    "no bias": (lambda: nn.Linear(SIZE, 20, bias=False), S3, ALL),
    "one row": (lambda: nn.Linear(SIZE, 20), (1, SIZE), ALL),
    "one output": (lambda: nn.Linear(SIZE, 1), S3, ALL),
    "frozen bias": (lambda: frozen_bias(nn.Linear(SIZE, 20)), (7, SIZE), ALL),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(SIZE, 20), nn.ReLU(inplace=True), nn.Linear(20, 8)),
        *(S3, ["0.weight", "2.weight"]),
    ),
    "attention": (Attention, S3, ["q.weight", "k.weight", "v.weight", "out.weight"]),
    "low rank": (LowRank, S3, ["down.weight", "up.weight"]),
    "class with torch's forward": (lambda: Inherited(SIZE, 20), (7, SIZE), ALL),
    **{name: (partial(Uses, way), shape, names) for name, (way, shape, names) in USED.items()},
    "tied": (tied, S3, ["0.weight"]),
    "overridden": (lambda: Overridden(SIZE, 20), (7, SIZE), []),
    "tensor hook": (hooked, (7, SIZE), []),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(SIZE, 20)), (7, SIZE), []),
    "torch's attention": (TorchAttention, S3, []),
    "conv 1-d": (lambda: nn.Conv1d(6, 9, 3), (4, 6, 17), BOTH),
    "conv 2-d": (lambda: nn.Conv2d(6, 9, 3, stride=2, padding=1), IMAGE, BOTH),
    "conv 3-d": (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 5, 6), BOTH),
    "conv one by one": (lambda: nn.Conv2d(6, 9, 1, bias=False), IMAGE, ALL),
    "conv groups": (
        lambda: nn.Conv2d(6, 12, 3, groups=6, dilation=2, padding="same"),
        *(IMAGE, BOTH),
    ),
    "conv uneven": (lambda: nn.Conv2d(6, 9, 3, padding=(1, 0)), IMAGE, BOTH),
    "conv even kernel": (lambda: nn.Conv2d(6, 9, 2, padding="same"), IMAGE, []),
    "conv reflected": (
        lambda: nn.Conv2d(6, 9, 3, padding=1, padding_mode="reflect"),
        *(IMAGE, BOTH),
    ),
    "conv frozen bias": (lambda: frozen_bias(nn.Conv2d(6, 9, 3)), IMAGE, ALL),
    "conv unbatched": (lambda: nn.Conv2d(6, 9, 3), (6, 9, 9), []),
    "conv transposed": (lambda: nn.ConvTranspose2d(5, 3, 2), (4, 5, 3, 3), []),
    "conv and norm": (
        lambda: nn.Sequential(
            nn.Conv2d(6, 9, 3, bias=False), nn.BatchNorm2d(9), nn.ReLU(True), nn.Conv2d(9, 4, 3)
        ),
        *(IMAGE, ["0.weight", "3.weight", "3.bias"]),
    ),
}
"""A module, the shape of its input, and which of its parameters split backwards take for W."""
NOT_RECOMPUTED = [name for name in MODULES if "from the second" in name]
"""Modules that torch itself cannot recompute, or that would see that they are."""
ROUNDED = ("twice and a penalty", "gradient penalty")
"""Weights with three gradients, which are not added in autograd's order."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated", "ignore:Using padding='same' with even kernel"
)


HALVES = ("2-d", "no bias", "attention", "conv 2-d", "conv groups")
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"is_recomputed": True},
    "input does not train": {"needs_input": False},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
}


CASES = [
    (name, way)
    for name, way in itertools.product(MODULES, WAYS)
    if (way != "recomputed" or name not in NOT_RECOMPUTED)
    and (way not in ("bf16", "fp16") or name in HALVES)
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_split_backwards_make_the_gradients_of_torch(name: str, way: str) -> None:
    make, shape, deferred = MODULES[name]
    given = WAYS[way]
    expected = by_torch(make, shape, **given)
    torch.manual_seed(4)
    module = make().to(given.get("dtype", torch.float32))

    split = Played(module, shape, is_split=True, **given).play()

    assert_trained_alike(split, expected, is_rounded=name in ROUNDED)
    assert split.names(split.sums.late) == deferred
    assert (split.stage.unfinished, split.deferred_bytes) == (0, 0)
    counts = [Counter(map(id, each.sums.completed)) for each in (split, expected)]
    assert sorted(counts[0].values()) == sorted(counts[1].values())


@pytest.mark.parametrize(
    ("name", "is_recomputed"),
    [
        (name, way == "recomputed")
        for name, way in CASES
        if way in ("kept", "recomputed") and not name.startswith("conv")
    ],
)
def test_sparse_products_have_all_of_the_gradient(name: str, is_recomputed: bool) -> None:
    """Whatever else uses a weight is added to what they accumulate, in one order."""
    make, shape, _ = MODULES[name]
    expected = by_torch(make, shape, is_recomputed=is_recomputed)
    played = []
    for is_split in (False, True):
        torch.manual_seed(4)
        one = Played(make(), shape, is_split=is_split, is_sparse=True, is_recomputed=is_recomputed)
        played.append(one.play())
    unsplit, split = played

    assert_trained_alike(split, unsplit)
    assert_trained_alike(unsplit, expected, is_rounded=name in ROUNDED)
    assert (split.stage.unfinished, split.deferred_bytes) == (0, 0)


COUNTS = {"3-d": 1, "no bias": 1, "mlp": 2, "attention": 4, "twice": 2, "tied": 2, "penalty": 1}
COUNTS |= {"raw product": 0, "gradient penalty": 2, "overridden": 0}
"""How many products of a microbatch are sparse."""


@pytest.mark.parametrize("name", COUNTS)
def test_every_call_of_a_plain_module_is_sparse(name: str) -> None:
    make, shape, _ = MODULES[name]
    played = Played(make(), shape, is_sparse=True).play()

    calls = sum(products.calls for products in played.sums.sparse.values())
    assert calls == MICROBATCHES * COUNTS[name]


def test_sparse_products_are_taken_while_they_are_wanted() -> None:
    module = nn.Linear(SIZE, 20)
    played = Played(module, is_sparse=True)
    [products] = played.sums.sparse.values()
    seen = []
    for is_wanted, multiplies, accumulates in (
        (True, True, True),
        (True, False, True),
        (True, True, False),
        (False, False, False),
    ):
        products.is_wanted, products.multiplies = is_wanted, multiplies
        products.accumulates = accumulates
        played.play()
        seen.append((products.outputs, products.input_gradients, products.calls))

    assert seen == [(3, 3, 3), (3, 3, 6), (6, 6, 6), (6, 6, 6)]


def test_a_recomputed_layer_keeps_no_activations_for_its_weights_before_its_backward() -> None:
    module = nn.Sequential(nn.Linear(SIZE, 400), nn.Tanh(), nn.Linear(400, SIZE))
    played = Played(module, (3, SIZE), is_split=True, is_recomputed=True)
    values = (SIZE + 400) + (400 + SIZE)  # of each row: input and output gradient of both layers
    for microbatch in range(3):
        assert played.deferred_bytes == 3 * values * 4 * microbatch
        y = played.forward(microbatch)
        assert played.deferred_bytes == 3 * values * 4 * microbatch
        played.backward(microbatch, y)


def test_what_several_products_share_is_counted_once_and_freed_with_the_last() -> None:
    played = Played(Attention(), is_split=True)
    for microbatch in range(3):
        played.backward(microbatch, played.forward(microbatch))

    # Inputs of q, k, v and out are x and the heads; the gradients of the three heads are a tensor
    # each.
    assert played.deferred_bytes == 3 * 6 * played.inputs[0].nbytes
    assert played.stage.unfinished == 3
    for microbatch in range(3):
        played.stage.weight_gradients(microbatch)
    assert (played.deferred_bytes, played.stage.unfinished) == (0, 0)


def test_at_most_one_dense_weight_gradient_is_there_at_a_time() -> None:
    width, layers = 256, 8
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    played = Played(module, (1, width), is_split=True, is_dropping=True)
    for microbatch in range(2):
        y = played.forward(microbatch)
        first = peak_of_torch(partial(played.backward, microbatch, y))
    played.stage.weight_gradients(0)
    second = peak_of_torch(lambda: played.stage.weight_gradients(1))

    assert first < width * width * 4
    assert width * width * 4 <= second < 1.5 * width * width * 4


def test_an_input_is_free_once_its_gradient_is_accumulated() -> None:
    """Not only at the end of the backward, as the graph is."""
    module = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    played = Played(module, (4, SIZE), is_sparse=True)
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def accumulate(rows: Tensor, outer: Tensor) -> bool:
        alive.append(sum(each() is not None for each in given))
        given.append(weakref.ref(rows))
        return True

    for products in played.sums.sparse.values():
        products.accumulate = accumulate  # type: ignore[method-assign]
    played.backward(0, played.forward(0))

    assert alive == [0, 0, 0]


# -- during sums over ranks -------------------------------------------------------------


class Polled:
    """A sum that is there at the last of so many polls."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def poll(self) -> bool:
        self.polls -= 1
        return self.polls <= 0


class Summing(torch.autograd.Function):
    """Waits for a sum in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        ctx.wait()
        return outer, None


class Layers(nn.Module):
    """A layer before a sum, and three behind it."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.before, self.wait = nn.Linear(SIZE, SIZE), wait
        self.after = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        apply: Callable[..., Tensor] = Summing.apply
        return self.after(apply(self.before(x), self.wait))


class Often(nn.Module):
    """A layer that is called once in the first microbatch, which shows it so, and twice later."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.calls, self.wait = nn.Linear(SIZE, SIZE), 0, wait

    def forward(self, x: Tensor) -> Tensor:
        apply: Callable[..., Tensor] = Summing.apply
        y: Tensor = self.linear(x)
        if self.calls:
            y = self.linear(apply(y, self.wait))
        self.calls += 1
        return y


def deferred_after_sums(
    make: Callable[[Callable[[], None]], nn.Module], polls: int, *, is_late: bool = False
) -> list[int]:
    """How many weight gradients wait after each sum; W runs late, or right after its backward."""
    left: list[int] = []

    def wait() -> None:
        played.products.compute_deferred(Polled(polls))
        deferred = played.products.deferred
        assert deferred is not None and deferred._current is not None
        left.append(len(deferred._current.each))

    played = Played(make(wait), is_split=True)
    if is_late:
        played.play()
        return left
    for microbatch in range(MICROBATCHES):
        played.backward(microbatch, played.forward(microbatch))
        played.stage.weight_gradients(microbatch)
    return left


@pytest.mark.parametrize(
    ("polls", "is_late", "while_waiting"),
    [(1, False, 0), (2, False, 1), (3, False, 2), (9, False, 3), (9, True, 0)],
)
def test_split_backwards_compute_weight_gradients_until_a_sum_is_there(
    polls: int, is_late: bool, while_waiting: int
) -> None:
    """But none while an earlier microbatch waits, as it does where W runs late."""
    left = deferred_after_sums(Layers, polls, is_late=is_late)

    first = 0 if is_late and polls > 3 else 3 - while_waiting
    assert left == [first, *[3 - while_waiting] * (MICROBATCHES - 1)]


def test_a_weight_waits_for_all_of_its_gradients_during_a_sum() -> None:
    assert deferred_after_sums(Often, 9) == [1] * (MICROBATCHES - 1)


def test_without_split_backwards_only_chosen_modules_wait() -> None:
    module, other = (Uses(lambda m, x: m.inner(m.inner(x))) for _ in range(2))

    assert len(Played(other).products) == 0
    assert len(Played(module, deferring={module.inner}).play().products) == 1
