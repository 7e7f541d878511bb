"""Pieces that the members of a stage share (`Layer.tensor`), and those that look so and have to be
refused.

Each function draws a module for the shape of what it gets, and says how its modules are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from fuzz.model_pieces import PIECES, Apply, Piece, Refused, Scaled, Shape
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from axsparse.models.layer import Split
from axsparse.models.tensor_parallel import chunks_of

Splits = dict[str, Split | str]
Draw = Callable[[Shape, Random], tuple[nn.Module, Splits]]
WORDS = 9
"""Of vocabularies: no number of chunks divides them."""
PARTS = (4, 12, 20, 4, 12, 28, 8, 4, 12, 16, 36, 4, 6)
"""Numbers of features, heads or units: most can be cut into four chunks, some into eight or two."""


def one_by_one(rng: Random) -> Callable[[Tensor], Tensor]:
    """A function of every feature by itself."""
    choices: list[Callable[[Tensor], Tensor]] = [
        F.gelu,
        F.silu,
        F.softplus,
        torch.tanh,
        F.leaky_relu,
        lambda x: x,
        lambda x: x.relu_(),
        lambda x: F.hardtanh(x, inplace=True),
        lambda x: x.mul_(0.9),
        lambda x: x * x.sigmoid(),
        lambda x: x.where(x > 0, x * 0.1),
        lambda x: x.masked_fill(x.abs() > 3, 0.0),
        lambda x: x.double().sin().to(x.dtype),
        lambda x: torch.stack([x, -x], dim=-1).amax(-1),
        lambda x: (x.square() + 1).sqrt(),
        lambda x: x + 0.5 * x.detach(),
        lambda x: x.contiguous().view(-1).clamp(-1, 1).view(x.shape),
        lambda x: x.transpose(0, -1).tanh().transpose(0, -1),
        lambda x: torch.einsum("b...i,b...i->b...i", x, x),
    ]
    return rng.choice(choices)


def by_units(rng: Random) -> Callable[[Tensor], Tensor]:
    """A function of some features that stay together, which are the last dimension."""
    return rng.choice(
        [
            lambda x: x.softmax(-1),
            lambda x: x.cumsum(-1),
            lambda x: x.sort(-1).values,
            lambda x: F.normalize(x, dim=-1),
            lambda x: x - x.mean(-1, keepdim=True),
            lambda x: x.roll(1, -1),
            lambda x: x.flip(-1),
            lambda x: F.layer_norm(x, x.shape[-1:]),
            lambda x: torch.stack(x.unbind(-1)[::-1], -1),
            lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
            lambda x: x.logsumexp(-1, keepdim=True) + x,
            lambda x: x.gather(-1, x.argsort(-1)),
            lambda x: x * x.amax(-1, keepdim=True),
        ]
    )


def bias(rng: Random) -> bool:
    return rng.random() < 0.6


# -- pieces that can be cut -------------------------------------------------------------------


def mlp(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    features, between = rng.choice(PARTS), one_by_one(rng)
    return Apply(
        lambda self, x: self.down(between(self.up(x))),
        up=nn.Linear(shape[-1], features, bias=bias(rng)),
        down=nn.Linear(features, rng.choice([shape[-1], 6, 7]), bias=bias(rng)),
    ), {"up": "column", "down": "row"}


def sequential(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    features = rng.choice(PARTS)
    act = rng.choice([nn.ReLU(inplace=True), nn.Tanh(), nn.SiLU(inplace=True), nn.Identity()])
    return nn.Sequential(
        nn.LayerNorm(shape[-1]),
        nn.Sequential(nn.Linear(shape[-1], features), act),
        nn.Linear(features, shape[-1]),
    ), {"1.0": "column", "2": "row"}


def units(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    unit, parts, between = rng.choice([1, 2, 3, 4]), rng.choice(PARTS), by_units(rng)

    def run(self: Any, x: Tensor) -> Tensor:
        inner = between(self.up(x).unflatten(-1, (-1, unit)))
        return x + self.down(inner.flatten(-2))  # type: ignore[no-any-return]

    return Apply(
        run,
        up=nn.Linear(shape[-1], unit * parts, bias=bias(rng)),
        down=nn.Linear(unit * parts, shape[-1], bias=bias(rng)),
    ), {"up": Split("column", unit=unit), "down": Split("row", unit=unit)}


def gated(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Gate and features of two matrices or of one."""
    features, between, has_bias = rng.choice(PARTS), one_by_one(rng), bias(rng)
    down = nn.Linear(features, shape[-1], bias=bias(rng))
    if rng.random() < 0.5:
        up, gate = (nn.Linear(shape[-1], features, bias=has_bias) for _ in range(2))
        return Apply(
            lambda self, x: x + self.down(between(self.gate(x)) * self.up(x)),
            up=up,
            gate=gate,
            down=down,
        ), {"up": "column", "gate": "column", "down": "row"}

    def run(self: Any, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(between(gate * 1) * up)  # type: ignore[no-any-return]

    both = nn.Linear(shape[-1], 2 * features, bias=has_bias)
    return Apply(run, both=both, down=down), {"both": Split("column", groups=2), "down": "row"}


def joined(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Two matrices in front of one, which has two groups."""
    features, gathered = rng.choice(PARTS), rng.random() < 0.3
    one, two = one_by_one(rng), one_by_one(rng)
    column = Split("column", gathered=gathered)
    return Apply(
        lambda self, x: self.down(torch.cat([one(self.a(x)), two(self.b(x))], -1)),
        a=nn.Linear(shape[-1], features, bias=bias(rng)),
        b=nn.Linear(shape[-1], features),
        down=nn.Linear(2 * features, shape[-1], bias=bias(rng)),
    ), {"a": column, "b": column, "down": Split("row", groups=2, gathered=gathered)}


def attention(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Queries, keys and values of matrices of their own; heads of keys may be fewer."""
    heads, size = rng.choice(PARTS), rng.choice([1, 2, 3, 4])
    each = rng.choice([1, 1, 2])
    causal, fused = rng.random() < 0.5, rng.random() < 0.5
    norm: nn.Module = rng.choice([nn.LayerNorm, nn.RMSNorm])(size)
    shared = rng.random() < 0.4

    def run(self: Any, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            m(x).view(b, s, -1, size).transpose(1, 2) for m in (self.query, self.key, self.value)
        )
        if shared:
            q, k = self.norm(q), self.norm(k)
        if each > 1:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        if fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            mixed = ((q @ k.transpose(-1, -2)) * size**-0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]

    module = Apply(
        run,
        query=nn.Linear(shape[-1], each * heads * size, bias=bias(rng)),
        key=nn.Linear(shape[-1], heads * size, bias=bias(rng)),
        value=nn.Linear(shape[-1], heads * size),
        out=nn.Linear(each * heads * size, shape[-1], bias=bias(rng)),
    )
    splits: Splits = dict.fromkeys(("query", "key", "value"), Split("column", unit=size))
    if shared:
        module.norm = norm
        splits["norm"] = "shared"
    return module, {**splits, "out": Split("row", unit=size)}


def fused_attention(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """One matrix for queries, keys and values."""
    heads, size, causal = rng.choice(PARTS), rng.choice([1, 2, 3]), rng.random() < 0.5

    def run(self: Any, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, -1, size).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]

    return Apply(
        run,
        norm=nn.LayerNorm(shape[-1]),
        qkv=nn.Linear(shape[-1], 3 * heads * size, bias=bias(rng)),
        out=nn.Linear(heads * size, shape[-1], bias=bias(rng)),
    ), {"qkv": Split("column", groups=3, unit=size), "out": Split("row", unit=size)}


def shared(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """A module with parameters that all units use, once or twice."""
    unit, parts, twice = rng.choice([2, 3, 4]), rng.choice(PARTS), rng.random() < 0.3
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(unit),
        lambda: nn.RMSNorm(unit),
        nn.PReLU,
        lambda: nn.Linear(unit, unit),
        lambda: nn.Sequential(nn.Linear(unit, 3), nn.Tanh(), nn.Linear(3, unit)),
        lambda: nn.LayerNorm(unit).requires_grad_(False),
    ]
    inner = rng.choice(choices)()

    def run(self: Any, x: Tensor) -> Tensor:
        y = self.inside["one"](self.up(x).unflatten(-1, (-1, unit)))
        if twice:
            y = self.inside["one"](y * 0.5)
        return self.down(y.flatten(-2))  # type: ignore[no-any-return]

    return Apply(
        run,
        up=nn.Linear(shape[-1], unit * parts, bias=bias(rng)),
        inside=nn.ModuleDict({"one": inner}),
        down=nn.Linear(unit * parts, shape[-1], bias=bias(rng)),
    ), {
        "up": Split("column", unit=unit),
        "inside.one": "shared",
        "down": Split("row", unit=unit),
    }


def gathered(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """What lies between sees all features, or one of the two splits is left out."""
    features, parts = rng.choice(PARTS), rng.choice([1, 1, 2])
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(features),
        lambda: nn.Sequential(nn.Linear(features, features), nn.Tanh()),
        lambda: nn.Softmax(dim=-1),
        lambda: nn.Dropout(0.2),
        nn.Identity,
    ]
    inner = rng.choice(choices)()

    def run(self: Any, x: Tensor) -> Tensor:
        y = self.up(x)
        if parts == 2:
            gate, y = y.chunk(2, -1)
            y = F.silu(gate) * y
        return x + self.down(self.inner(y))  # type: ignore[no-any-return]

    splits: Splits = {
        "up": Split("column", groups=parts, gathered=True),
        "down": Split("row", gathered=True),
    }
    if rng.random() < 0.3:
        splits.pop(rng.choice(["up", "down"]))
    return Apply(
        run,
        up=nn.Linear(shape[-1], parts * features, bias=bias(rng)),
        inner=inner,
        down=nn.Linear(features, shape[-1], bias=bias(rng)),
    ), splits


class Experts(nn.Module):
    """Experts in stacks of matrices, whose outputs a router weighs."""

    def __init__(self, size: int, features: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 2 * features, size) / 3)
        self.down = nn.Parameter(torch.randn(2, size, features) / 3)
        self.between = between

    def forward(self, x: Tensor, weights: Tensor, *, chosen: Tensor | None = None) -> Tensor:
        gate, up = torch.einsum("b...i,efi->eb...f", x, self.up).chunk(2, -1)
        each = torch.einsum("eb...f,eif->eb...i", self.between(gate * 1) * up, self.down)
        if chosen is not None:
            weights = weights * F.one_hot(chosen, 2).to(weights.dtype)
        return torch.einsum("eb...i,b...e->b...i", each, weights)


def experts(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    alone = rng.random() < 0.5

    def run(self: Any, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1) if alone else None
        return x + self.experts(x, weights, chosen=chosen)  # type: ignore[no-any-return]

    return Apply(
        run,
        router=nn.Linear(shape[-1], 2),
        experts=Experts(shape[-1], rng.choice(PARTS), one_by_one(rng)),
    ), {
        "experts": "summed",
        "experts.up": Split("column", groups=2),
        "experts.down": "row",
    }


def table(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Integers of the activations are words."""
    words = rng.choice([WORDS, WORDS, 16, 5])

    def run(self: Any, x: Tensor) -> Tensor:
        found = (x.detach().select(-1, 0) * 4).long().clamp(0, words - 1)
        return x + self.table(found)  # type: ignore[no-any-return]

    return Apply(run, table=nn.Embedding(words, shape[-1])), {"table": "vocabulary"}


def block(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Attention and MLP, one behind the other."""
    (one, first), (two, second) = fused_attention(shape, rng), gated(shape, rng)
    return Apply(
        lambda self, x: self.two(self.norm(x + self.one(x))),
        one=one,
        two=two,
        norm=nn.LayerNorm(shape[-1]),
    ), {
        **{f"one.{path}": split for path, split in first.items()},
        **{f"two.{path}": split for path, split in second.items()},
    }


def behind_sums(rng: Random) -> Callable[[Any, Tensor], Tensor]:
    """A function of what a row split returns, of which each member may have some tokens. `self` has
    the parameters `scale`, of a feature, and `one`, and the module `matrix`."""
    choices: list[Callable[[Any, Tensor], Tensor]] = [
        lambda self, x: x.flip(-2) + x,
        lambda self, x: x.cumsum(-2) / 3,
        lambda self, x: x - x.mean(-2, keepdim=True),
        lambda self, x: x - x.mean(-1, keepdim=True),
        lambda self, x: x.double().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype) * x,
        lambda self, x: x * self.scale,
        lambda self, x: (1 + self.scale.float()).type_as(x) * x - self.one,
        lambda self, x: F.rms_norm(x, x.shape[-1:], self.scale),
        lambda self, x: F.layer_norm(x, x.shape[-2:]),
        lambda self, x: self.matrix(x) * self.scale,
        _dropped,
        lambda self, x: torch.where(x > 0, x, x * self.one),
        lambda self, x: x + self.scale[: x.shape[-2], None, None].sum(0),
        lambda self, x: x / (1 + x.detach().abs()),
        lambda self, x: x * torch.linspace(0, 1, x.shape[-2], dtype=x.dtype)[:, None],
        lambda self, x: x.softmax(-2) + x.softmax(-1),
        lambda self, x: torch.cat([x[..., 1:], x[..., :1]], -1) + x.square(),
        lambda self, x: torch.stack(x.unbind(-2), -2).neg(),
        lambda self, x: x.view(-1).tanh().view(x.shape),
        lambda self, x: F.gelu(x + 0.0, approximate="tanh"),
        lambda self, x: checkpoint(self.matrix, x, use_reentrant=False),
        lambda self, x: Scaled.apply(x, 0.9),  # type: ignore[no-untyped-call]
        lambda self, x: Scaled.apply(x.view(x.shape), 0.9),  # type: ignore[no-untyped-call]
        lambda self, x: x.clone().mul_(0.7),
    ]
    return rng.choice(choices)


def _dropped(self: Any, x: Tensor) -> Tensor:
    return self.dropout(x) + x  # type: ignore[no-any-return]


def tokens(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """What members may compute token by token, before and between two MLPs with residuals."""
    (one, first), (two, second) = sequential(shape, rng), sequential(shape, rng)
    functions = [behind_sums(rng) for _ in range(3)]

    def run(self: Any, x: Tensor) -> Tensor:
        x = functions[0](self, x)
        x = functions[1](self, x + self.one_mlp(x))
        return functions[2](self, x + self.two_mlp(x) * 0.5)

    module = Apply(
        run,
        one_mlp=one,
        two_mlp=two,
        scale=nn.Parameter(torch.rand(shape[-1]) + 0.5),
        one=nn.Parameter(torch.full((), 0.3)),
        matrix=nn.Linear(shape[-1], shape[-1], bias=bias(rng)),
    )
    if _dropped in functions:
        module.dropout = nn.Dropout(0.3)
    return module, {
        **{f"one_mlp.{path}": split for path, split in first.items()},
        **{f"two_mlp.{path}": split for path, split in second.items()},
    }


def calls(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """An MLP that is called in odd ways."""
    module, splits = sequential(shape, rng)

    def twice(self: Any, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]

    def again(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    def stopped(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            offset = self.inner(x)
        return x + offset + self.inner(x)  # type: ignore[no-any-return]

    def detached(self: Any, x: Tensor) -> Tensor:
        return x + self.inner(x.detach())  # type: ignore[no-any-return]

    def nested(self: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf)
        return self.inner(x) + 0.1 * slope  # type: ignore[no-any-return]

    def sometimes(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.detach().sum() > 0) else x * 0.5

    run = rng.choice([twice, again, stopped, detached, nested, sometimes])
    return Apply(run, inner=module), {f"inner.{path}": split for path, split in splits.items()}


class VocabularyHead(nn.Module):
    """The last layer, which hands activations and the weight of its words to the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inner = nn.Linear(torch.Size(shape).numel(), 6)
        self.weight = nn.Parameter(torch.randn(WORDS, 6) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(self.inner(x.flatten(1))), *chunks_of(self.weight)


# -- pieces that have to be refused -------------------------------------------------------------


def _with_splits(
    shape: Shape, between: nn.Module | None = None, *, features: int = 8, **splits: Split | str
) -> tuple[nn.Module, Splits]:
    """An MLP with something between its splits, and other splits than the usual ones."""
    return Apply(
        lambda self, x: self.down(self.inner(self.up(x))),
        up=nn.Linear(shape[-1], features),
        inner=nn.Identity() if between is None else between,
        down=nn.Linear(features, shape[-1]),
    ), {"up": "column", "down": "row", **splits}


def uneven(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """No power of two divides the features, or the parts that stay together."""
    if rng.random() < 0.5:
        return _with_splits(shape, features=rng.choice([1, 5, 7, 9]))
    unit = Split("column", unit=8), Split("row", unit=8)
    return _with_splits(shape, features=24, up=unit[0], down=unit[1])


def neither_cut_nor_shared(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """A parameter between the splits."""
    choices: list[Callable[[], nn.Module]] = [
        nn.PReLU,
        lambda: Apply(lambda self, x: x * self.scale, scale=nn.Parameter(torch.ones(()))),
        lambda: Apply(lambda self, x: x + self.shift, shift=nn.Parameter(torch.ones(1))),
    ]
    inner = rng.choice(choices)()
    return _with_splits(shape, inner)


def odd_between(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """What cannot see some features only, is not seen for each chunk, or remembers chunks."""

    def mean(self: Any, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean()
        return x - self.mean.to(x.dtype)  # type: ignore[no-any-return]

    def count(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(x)  # type: ignore[no-any-return]

    if rng.random() < 0.2:
        counts = Apply(count, norm=nn.PReLU(), count=torch.zeros((), dtype=torch.int64))
        return _with_splits(shape, counts, inner="shared")
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(8),
        lambda: nn.Dropout(0.3),
        lambda: nn.Linear(8, 8),
        lambda: Apply(lambda self, x: x.view(*x.shape[:-1], 4, 2).flatten(-2)),
        lambda: Apply(lambda self, x: x / (1 + x.detach().abs().max().item())),
        lambda: Apply(lambda self, x: Scaled.apply(x, 0.9)),  # type: ignore[no-untyped-call]
        lambda: Apply(lambda self, x: x + torch.randn_like(x)),
        lambda: Apply(lambda self, x: x * torch.linspace(0, 1, 8, dtype=x.dtype)),
        lambda: Apply(lambda self, x: x.detach()),
        lambda: Apply(mean, mean=torch.zeros(())),
    ]
    inner = rng.choice(choices)()
    return _with_splits(shape, inner)


def odd_splits(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Splits that do not belong to each other, or to their modules."""
    match rng.randrange(10):
        case 0:  # a column split alone
            module, splits = _with_splits(shape)
            splits.pop("down")
        case 8:  # whose parts leave the layer
            up = nn.Linear(shape[-1], 8)
            module, splits = Apply(lambda self, x: torch.tanh(self.up(x)), up=up), {"up": "column"}
        case 1:  # a row split alone
            module, splits = _with_splits(shape)
            splits.pop("up")
        case 2:
            module, splits = _with_splits(shape, nn.Linear(8, 8), inner="column")
        case 3:
            module, splits = _with_splits(shape, nn.Linear(8, 8), inner="row")
        case 4:
            module, splits = _with_splits(shape, down=Split("row", gathered=True))
        case 5:
            module, splits = _with_splits(shape, nowhere="column")
        case 6:
            module, splits = _with_splits(shape, inner="column")
        case 7:
            module, splits = _with_splits(shape, nn.LayerNorm(8), inner="column")
        case _:
            module, splits = _with_splits(shape, up=Split("column", gathered=True))
    return module, splits


def odd_modules(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Modules that are more than a plain matrix."""
    module, splits = _with_splits(shape)
    up: Any = module.up
    match rng.randrange(8):
        case 0:
            up.register_forward_hook(lambda module, given, got: got * 0.5)
        case 1:
            up.weight.register_hook(lambda gradient: gradient * 0.5)
        case 2:
            up.weight.requires_grad_(False)
        case 3:
            module.up = nn.Linear(shape[-1], 8)
            module.up.__class__ = type("Own", (nn.Linear,), {})
        case 4:
            parametrizations.weight_norm(up)
        case 5:
            module.also = up  # under a second name
            splits["also"] = splits.pop("up")
        case 6:
            up.register_full_backward_hook(
                lambda module, given, got: tuple(g if g is None else g * 0.5 for g in given)
            )
        case _:
            module = Apply(
                lambda self, x: self.down(F.linear(x, self.up.weight)), up=up, down=module.down
            )
    return module, splits


def odd_words(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Embeddings that are more than a table."""
    module, splits = table(shape, rng)
    options: dict[str, Any] = rng.choice([{"padding_idx": 1}, {"max_norm": 0.5}])
    module.table = nn.Embedding(16, shape[-1], **options)
    return module, splits


def _piece(draw: Draw, refused: Refused = "", **options: Any) -> Piece:
    def splits(shape: Shape, number: int) -> Mapping[str, Split | str]:
        with torch.device("meta"):
            return draw(shape, Random(number))[1]  # noqa: S311 - details of a piece

    def make(shape: Shape, number: int) -> nn.Module:
        return draw(shape, Random(number))[0]  # noqa: S311 - details of a piece

    return Piece(make, refused=refused, splits=splits, **options)


CUT_PIECES: Mapping[str, Piece] = {
    "mlp": _piece(mlp),
    "cut sequential": _piece(sequential),
    "units": _piece(units),
    "gated": _piece(gated),
    "joined": _piece(joined),
    "heads": _piece(attention, ranks=(2,)),
    "fused heads": _piece(fused_attention, ranks=(2,)),
    "shared": _piece(shared),
    "gathered": _piece(gathered),
    "experts": _piece(experts),
    "words": _piece(table),
    "block": _piece(block, ranks=(2,)),
    "tokens": _piece(tokens, ranks=(2,)),
    "cut calls": _piece(calls),
    "uneven": _piece(uneven, "members"),
    "neither": _piece(neither_cut_nor_shared, "members"),
    "odd between": _piece(odd_between, "cut"),
    "odd splits": _piece(odd_splits, "cut"),
    "odd modules": _piece(odd_modules, "cut"),
    "odd words": _piece(odd_words, "cut"),
}
"""By name, as `PIECES`."""
ALL_PIECES: Mapping[str, Piece] = {**PIECES, **CUT_PIECES}
