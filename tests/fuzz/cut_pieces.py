"""Pieces that tensor-parallel ranks share (`Layer.tp_plan`).

Each function draws a module for the shape of what it gets, and says how its modules are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from fuzz.model_pieces import PIECES, Apply, Piece, Shape
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axsparse.models.layer import TpStyle

Splits = dict[str, TpStyle | str]
Draw = Callable[[Shape, Random], tuple[nn.Module, Splits]]
WORDS = 9
"""Of vocabularies: no number of ranks divides them."""
PARTS = (4, 12, 20, 4, 12, 28, 8, 4, 12, 16, 36, 4, 6)
"""Numbers of features, heads or units: most give four shards."""


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
    ), {"up": "colwise", "down": "rowwise"}


def sequential(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    features = rng.choice(PARTS)
    act = rng.choice([nn.ReLU(inplace=True), nn.Tanh(), nn.SiLU(inplace=True), nn.Identity()])
    return nn.Sequential(
        nn.LayerNorm(shape[-1]),
        nn.Sequential(nn.Linear(shape[-1], features), act),
        nn.Linear(features, shape[-1]),
    ), {"1.0": "colwise", "2": "rowwise"}


def units(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    unit, parts, between = rng.choice([1, 2, 3, 4]), rng.choice(PARTS), by_units(rng)

    def run(self: Any, x: Tensor) -> Tensor:
        inner = between(self.up(x).unflatten(-1, (-1, unit)))
        return x + self.down(inner.flatten(-2))  # type: ignore[no-any-return]

    return Apply(
        run,
        up=nn.Linear(shape[-1], unit * parts, bias=bias(rng)),
        down=nn.Linear(unit * parts, shape[-1], bias=bias(rng)),
    ), {"up": TpStyle("colwise", unit=unit), "down": TpStyle("rowwise", unit=unit)}


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
        ), {"up": "colwise", "gate": "colwise", "down": "rowwise"}

    def run(self: Any, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(between(gate * 1) * up)  # type: ignore[no-any-return]

    both = nn.Linear(shape[-1], 2 * features, bias=has_bias)
    return Apply(run, both=both, down=down), {
        "both": TpStyle("colwise", packed=2),
        "down": "rowwise",
    }


def joined(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Two matrices in front of one, which has two groups."""
    features = rng.choice(PARTS)
    one, two = one_by_one(rng), one_by_one(rng)
    style = TpStyle(rng.choice(["colwise", "colwise", "gather_output"]))
    return Apply(
        lambda self, x: self.down(torch.cat([one(self.a(x)), two(self.b(x))], -1)),
        a=nn.Linear(shape[-1], features, bias=bias(rng)),
        b=nn.Linear(shape[-1], features),
        down=nn.Linear(2 * features, shape[-1], bias=bias(rng)),
    ), {"a": style, "b": style, "down": TpStyle("rowwise", packed=2)}


def attention(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """Queries, keys and values of separate matrices; heads of keys may be fewer."""
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
    splits: Splits = dict.fromkeys(("query", "key", "value"), TpStyle("colwise", unit=size))
    if shared:
        module.norm = norm
        splits["norm"] = "replicated"
    return module, {**splits, "out": TpStyle("rowwise", unit=size)}


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
    ), {"qkv": TpStyle("colwise", packed=3, unit=size), "out": TpStyle("rowwise", unit=size)}


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
        "up": TpStyle("colwise", unit=unit),
        "inside.one": "replicated",
        "down": TpStyle("rowwise", unit=unit),
    }


def gathered(shape: Shape, rng: Random) -> tuple[nn.Module, Splits]:
    """The modules in between see all features, or one of the two modules is left out."""
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
        "up": TpStyle("gather_output", packed=parts),
        "down": "rowwise",
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
        "experts": "experts",
        "experts.up": TpStyle("colwise", packed=2),
        "experts.down": "rowwise",
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
        return torch.tanh(self.inner(x.flatten(1))), self.weight


def _piece(draw: Draw, **options: Any) -> Piece:
    def splits(shape: Shape, number: int) -> Mapping[str, TpStyle | str]:
        with torch.device("meta"):
            return draw(shape, Random(number))[1]  # noqa: S311 - details of a piece

    def make(shape: Shape, number: int) -> nn.Module:
        return draw(shape, Random(number))[0]  # noqa: S311 - details of a piece

    return Piece(make, splits=splits, **options)


CUT_PIECES: Mapping[str, Piece] = {
    "mlp": _piece(mlp),
    "cut sequential": _piece(sequential),
    "units": _piece(units),
    "gated": _piece(gated),
    "joined": _piece(joined),
    "heads": _piece(attention, ranks=(2,)),
    "fused heads": _piece(fused_attention, ranks=(2,)),
    "replicated": _piece(shared),
    "gathered": _piece(gathered),
    "experts": _piece(experts),
    "words": _piece(table),
    "block": _piece(block, ranks=(2,)),
    "cut calls": _piece(calls),
}
"""By name, as `PIECES`."""
ALL_PIECES: Mapping[str, Piece] = {**PIECES, **CUT_PIECES}
