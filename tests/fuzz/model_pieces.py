"""The pieces that generated models are made of: every kind of layer that torch lets one write.

A piece is made for the shape of what it gets, without the batch's dimension, and may return any
other shape. `number` is a small random number that decides its details.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from axsparse.models.layer import TpStyle

Shape = tuple[int, ...]
Make = Callable[[Shape, int], nn.Module]


class Apply(nn.Module):
    """A function of the module and its input, with members of any kind."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **members: Any) -> None:
        super().__init__()
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=not name.startswith("cache"))
            else:
                setattr(self, name, value)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@dataclass(frozen=True)
class Piece:
    """How to make one kind of layer, and what has to be known of it."""

    make: Make
    ranks: tuple[int, ...] = (1, 2, 3)
    """How many dimensions its input may have, the batch's not counted."""
    random: bool = False
    """Whether its forward draws random numbers."""
    moves: bool = False
    """Whether its output in training depends on statistics that it changes."""
    batches: bool = False
    """Whether a microbatch of one sample is too small for it."""
    fp32_only: bool = False
    itself: bool = False
    """Whether it has buffers with contents, which a layer with an `init` may not have."""
    splits: Callable[[Shape, int], Mapping[str, TpStyle | str]] = lambda shape, number: {}
    """How its modules are sharded."""


def plain(function: Callable[[Tensor], Any]) -> Make:
    return lambda shape, number: Apply(lambda self, x: function(x))


def square(shape: Shape, *_: int) -> nn.Module:
    return nn.Linear(shape[-1], shape[-1])


def width(number: int) -> int:
    return (4, 6, 7, 8)[number % 4]


class Scaled(torch.autograd.Function):
    """A function with a custom backward, which gives no gradient to the factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class AlwaysEvaluates(nn.Module):
    """A module that stays in evaluation, as frozen normalisations are written."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)
        self.inner = nn.Linear(size, size)

    def train(self, mode: bool = True) -> AlwaysEvaluates:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)
        out: Tensor = self.inner(flat)
        return out


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized(shape: Shape, number: int) -> nn.Module:
    module = square(shape)
    match number % 4:
        case 0:
            parametrizations.weight_norm(module)
        case 1:
            parametrizations.orthogonal(module)
        case 2:
            parametrize.register_parametrization(module, "weight", Symmetric())
        case 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.nn.utils.weight_norm(module)
    return module


def _spectral(shape: Shape, number: int) -> nn.Module:
    return parametrizations.spectral_norm(square(shape), n_power_iterations=1 + number % 2)


def _attention(shape: Shape, number: int, dropout: float = 0.0) -> nn.Module:
    size = shape[-1]
    heads = 2 if size % 2 == 0 else 1
    first = number % 2 == 0
    inner = nn.MultiheadAttention(size, heads, dropout=dropout, batch_first=first)

    def run(self: Any, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        out: Tensor = self.inner(x, x, x, need_weights=number % 3 == 0)[0]
        return out if first else out.transpose(0, 1)

    return Apply(run, inner=inner)


def _encoder(shape: Shape, number: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape[-1], 1, 8, (0.0, 0.2)[number % 2], batch_first=True, norm_first=number % 3 == 0
    )


def _sdpa(shape: Shape, number: int) -> nn.Module:
    size = shape[-1]

    def run(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=number % 2 == 0)

    return Apply(run, qkv=nn.Linear(size, 3 * size, bias=number % 3 == 0))


def _recurrent(shape: Shape, number: int, kind: type[nn.Module], dropout: float = 0.0) -> nn.Module:
    inner = kind(
        shape[-1],
        width(number),
        num_layers=1 + bool(dropout) + (number % 5 == 4),
        batch_first=True,
        bidirectional=number % 3 == 0,
        **({"dropout": dropout} if dropout else {}),
    )

    def run(self: Any, x: Tensor) -> Any:
        out, hidden = self.inner(x)
        if number % 4 == 3:  # the last state, as a classifier takes it
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            return hidden.transpose(0, 1).flatten(1)
        return out

    return Apply(run, inner=inner)


def _cell(shape: Shape, number: int) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]

    kind = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)[number % 3]
    return Apply(run, cell=kind(shape[-1], width(number)))


def _conv1d(shape: Shape, number: int) -> nn.Module:
    channels, groups = shape[0], shape[0] if number % 3 == 2 else 1
    out = channels if groups > 1 else width(number)
    kind = nn.ConvTranspose1d if number % 5 == 4 else nn.Conv1d
    return kind(channels, out, 3, padding=1, groups=groups, bias=number % 2 == 0)


def _conv2d(shape: Shape, number: int) -> nn.Module:
    channels, groups = shape[0], shape[0] if number % 3 == 2 else 1
    out = channels if groups > 1 else width(number)
    kind = nn.ConvTranspose2d if number % 5 == 4 else nn.Conv2d
    module: Any = kind(channels, out, 3, padding=1, groups=groups, bias=number % 2 == 0)
    if number % 4 == 3:
        module = module.to(memory_format=torch.channels_last)
    made: nn.Module = module
    return made


def _batch_norm(shape: Shape, number: int) -> nn.Module:
    kinds: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}
    choices: list[dict[str, Any]] = [
        {},
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False},
    ]
    return kinds[len(shape)](shape[0], **choices[number % 4])


def _instance_norm(shape: Shape, number: int) -> nn.Module:
    kind = {2: nn.InstanceNorm1d, 3: nn.InstanceNorm2d}[len(shape)]
    return kind(shape[0], affine=number % 2 == 0, track_running_stats=number % 3 == 0)


def _activation(shape: Shape, number: int) -> nn.Module:
    choices: list[Callable[[], nn.Module]] = [
        partial(nn.ReLU, inplace=True),
        partial(nn.ELU, inplace=True),
        partial(nn.SiLU, inplace=True),
        partial(nn.LeakyReLU, 0.1, inplace=True),
        partial(nn.Hardtanh, inplace=True),
        nn.GELU,
        nn.Tanh,
        partial(nn.Softmax, dim=-1),
        partial(nn.LogSoftmax, dim=-1),
        nn.PReLU,
        partial(nn.PReLU, shape[0]),
        nn.Identity,
        nn.Softplus,
        partial(nn.Threshold, 0.0, 0.1, inplace=True),
    ]
    return choices[number % len(choices)]()


def _function(shape: Shape, number: int) -> nn.Module:
    """Functions without parameters; none of them returns a strided tensor."""
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.cumsum(-1),
        lambda x: x.sort(-1).values,
        lambda x: torch.fft.rfft(x, dim=-1).abs(),
        lambda x: torch.view_as_real(torch.fft.rfft(x, dim=-1)).flatten(-2),
        lambda x: torch.cat([x, x.detach()], -1)[..., : x.shape[-1]].clone(),
        lambda x: x.where(x > 0, x * 0.1),
        lambda x: x.masked_fill(x.abs() > 3, 0.0),
        lambda x: x.gather(-1, x.argsort(-1)),
        lambda x: x.topk(2, dim=-1).values,
        lambda x: torch.zeros_like(x).scatter_add(-1, x.argsort(-1), x),
        lambda x: x.index_select(-1, torch.arange(x.shape[-1] - 1, -1, -1)),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.pad(x, (1, 0)),
        lambda x: x.roll(1, -1),
        lambda x: x.flip(-1),
        lambda x: x.view_as(x),
        lambda x: x,
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: x.unsqueeze(1) if x.dim() < 4 else x,
        lambda x: Scaled.apply(x, 0.9),  # type: ignore[no-untyped-call]
        lambda x: x.double().sin().to(x.dtype),
        lambda x: x.amax(-1, keepdim=True) - x,
        lambda x: x.logsumexp(-1, keepdim=True) + x,
        lambda x: x if bool(x.detach().sum() > 0) else x * 0.5,
        lambda x: torch.einsum("b...i,b...i->b...i", x, x),
        lambda x: x.split(1, dim=-1)[0].repeat_interleave(3, dim=-1),
        lambda x: torch.stack([x, -x], dim=-1).amax(-1),
        lambda x: x.to(torch.float64).to(torch.float32).to(x.dtype),
    ]
    return plain(choices[number % len(choices)])(shape, number)


def _strided(shape: Shape, number: int) -> nn.Module:
    """Functions whose result shares memory with something larger, or lies in another order."""
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(1, -1),
        lambda x: x[..., 1:],
        lambda x: x[..., ::2],
        lambda x: x[:, :1].expand_as(x),
        lambda x: x.movedim(-1, 1),
        lambda x: x.unfold(1, 2, 1).flatten(2),
        lambda x: x.unsqueeze(-1).expand(*x.shape, 2)[..., 0],
        lambda x: x.chunk(2, -1)[0],
        lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.mT.mT,
        lambda x: x.narrow(-1, 0, x.shape[-1] - 1),
        lambda x: x.diagonal(dim1=-2, dim2=-1),
    ]
    return plain(choices[number % len(choices)])(shape, number)


def _writes(shape: Shape, number: int) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        match number % 4:
            case 0:
                x.add_(0.5)
                return x
            case 1:
                x.mul_(0.9)
                return self.inner(x)  # type: ignore[no-any-return]
            case 2:
                return F.relu_(x)
            case _:
                x.view(-1)[0] = 0.0
                return x * 1.0

    return Apply(run, inner=square(shape))


def _weights(shape: Shape, number: int) -> nn.Module:
    """Parameters of odd shapes and types, and odd ways to use them."""
    size = shape[-1]
    match number % 13:
        case 0:
            return Apply(lambda self, x: x * self.scale, scale=nn.Parameter(torch.ones(())))
        case 1:
            empty = nn.Parameter(torch.zeros(0))
            return Apply(
                lambda self, x: x * self.scale + self.empty.sum(),
                empty=empty,
                scale=nn.Parameter(torch.ones(size)),
            )
        case 2:
            return Apply(lambda self, x: self.used(x), used=square(shape), unused=square(shape))
        case 3:
            inner = square(shape)
            return Apply(lambda self, x: self.a(torch.tanh(self.b(x))), a=inner, b=inner)
        case 4:
            one, two = square(shape), square(shape)
            two.weight = one.weight
            return Apply(lambda self, x: self.a(torch.tanh(self.b(x))), a=one, b=two)
        case 5:
            table = nn.ParameterDict({"w": nn.Parameter(torch.randn(size, size) / 3)})
            return Apply(
                lambda self, x: torch.einsum("b...i,io->b...o", x, self.table["w"]), table=table
            )
        case 6:
            return Apply(lambda self, x: x @ self.w.t(), w=nn.Parameter(torch.randn(5, size) / 3))
        case 7:
            return Apply(
                lambda self, x: F.linear(x, self.w.view(size, size)),
                w=nn.Parameter(torch.randn(size * size) / 3),
            )
        case 8:
            frozen = square(shape).requires_grad_(False)
            return Apply(
                lambda self, x: self.frozen(x) * self.scale,
                frozen=frozen,
                scale=nn.Parameter(torch.ones(1, size)),
            )
        case 9:  # what came before gets no gradient
            whole = nn.Parameter(torch.ones(shape))
            return Apply(lambda self, x: self.w.expand(x.shape[0], *shape).clone(), w=whole)
        case 10:
            return Apply(lambda self, x: self.inner(x.detach()), inner=square(shape))
        case 11:
            inner = nn.Linear(size, size)
            inner.register_parameter("absent", None)
            inner.register_buffer("missing", None)
            return inner
        case _:
            return nn.Sequential(square(shape), nn.Tanh(), nn.Sequential(square(shape)))


def _bilinear(shape: Shape, number: int) -> nn.Module:
    size = shape[-1]
    return Apply(lambda self, x: self.inner(x, x), inner=nn.Bilinear(size, size, width(number)))


def _calls(shape: Shape, number: int) -> nn.Module:
    """A matrix called in ways that get into the way of autograd."""
    match number % 8:
        case 0:
            return Apply(
                lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
                inner=nn.Sequential(square(shape), nn.Tanh()),
            )
        case 1:

            def cast(self: Any, x: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.inner(x).to(x.dtype)  # type: ignore[no-any-return]

            return Apply(cast, inner=square(shape))
        case 2:
            inner = square(shape)
            inner.register_full_backward_hook(
                # The first of a model's layers has an input without a gradient.
                lambda module, given, got: tuple(
                    None if each is None else each * 0.5
                    for each in given  # type: ignore[attr-defined]
                )
            )
            return inner
        case 3:
            inner = square(shape)
            inner.register_forward_hook(lambda module, given, got: got + given[0])
            return inner
        case 4:

            def stopped(self: Any, x: Tensor) -> Tensor:
                with torch.no_grad():
                    offset = self.inner(x)
                return x + offset + self.other(x)  # type: ignore[no-any-return]

            return Apply(stopped, inner=square(shape), other=square(shape))
        case 6:
            return AlwaysEvaluates(shape[-1])
        case 5:
            hooked = nn.Linear(shape[-1], shape[-1])
            hooked.weight.register_hook(lambda gradient: gradient * 0.5)
            return hooked
        case _:

            def nested(self: Any, x: Tensor) -> Tensor:
                with torch.enable_grad():
                    leaf = x.detach().requires_grad_()
                    (slope,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf)
                return self.inner(x) + 0.1 * slope  # type: ignore[no-any-return]

            return Apply(nested, inner=square(shape))


def _table(shape: Shape, number: int, **options: Any) -> nn.Module:
    """Integers of the activations look up rows of a table."""
    size = shape[-1]

    def run(self: Any, x: Tensor) -> Tensor:
        rows = (x.detach() * 4).long().clamp(-4, 4) + 4
        if number % 3 == 2:
            return self.bag(rows.flatten(1))  # type: ignore[no-any-return]
        return x + self.table(rows.select(-1, 0))  # type: ignore[no-any-return]

    if number % 3 == 2:
        return Apply(run, bag=nn.EmbeddingBag(9, size, mode=("sum", "mean")[number % 2], **options))
    return Apply(run, table=nn.Embedding(9, size, padding_idx=(None, 4)[number % 2], **options))


TYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
ODD_TYPES = (
    torch.complex64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex128,
)


def _buffers(shape: Shape, number: int, types: tuple[torch.dtype, ...] = TYPES) -> nn.Module:
    kind = types[number % len(types)]
    whole = torch.arange(12).remainder(2).to(kind)
    forms: list[Callable[[], Tensor]] = [
        lambda: whole,
        lambda: whole[0],
        lambda: whole[:0],
        lambda: whole.view(3, 4).t(),
        lambda: whole[::2],
        lambda: whole[:1].expand(5),
    ]
    form = forms[number // len(types) % len(forms)]()

    def run(self: Any, x: Tensor) -> Tensor:
        value = self.a.real if self.a.is_complex() else self.a
        return self.inner(x) + value.float().sum().to(x.dtype)  # type: ignore[no-any-return]

    return Apply(run, inner=square(shape), a=form, b=form[:1] if form.dim() else form)


def _changing(shape: Shape, number: int) -> nn.Module:
    """Buffers that a training forward changes, which do not matter for its output."""

    def run(self: Any, x: Tensor) -> Tensor:
        if self.training:
            match number % 4:
                case 0:
                    self.count += 1
                case 1:
                    self.count = self.count + 1
                case 2:
                    self.count.add_(x.shape[0])
                case _:
                    self.mean = x.detach().mean().float() * 0.1 + self.mean * 0.9
        elif number % 5 == 0:
            return self.inner(x) + self.mean.to(x.dtype)  # type: ignore[no-any-return]
        return self.inner(x) + self.cache.to(x.dtype)  # type: ignore[no-any-return]

    return Apply(
        run,
        inner=square(shape),
        count=torch.zeros((), dtype=torch.int64),
        mean=torch.zeros(()),
        cache=torch.ones(1),
    )


def _moving(shape: Shape, number: int) -> nn.Module:
    """Statistics that the training forward itself uses."""

    def run(self: Any, x: Tensor) -> Tensor:
        if self.training:
            new = x.detach().float().flatten(1).mean(1).mean()
            if number % 2:
                self.mean.mul_(0.9).add_(0.1 * new)
            else:
                self.mean = 0.9 * self.mean + 0.1 * new
        return self.inner(x - self.mean.to(x.dtype))  # type: ignore[no-any-return]

    return Apply(run, inner=square(shape), mean=torch.zeros(()))


def _dropout(shape: Shape, number: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        partial(nn.Dropout, 0.3),
        partial(nn.Dropout, 0.3, inplace=True),
        partial(nn.AlphaDropout, 0.2),
        partial(nn.FeatureAlphaDropout, 0.2),
        partial(nn.Dropout1d, 0.3) if len(shape) == 2 else partial(nn.Dropout, 0.1),
        partial(nn.Dropout2d, 0.3) if len(shape) == 3 else partial(nn.Dropout, 0.1),
    ]
    return kinds[number % len(kinds)]()


def _random(shape: Shape, number: int) -> nn.Module:
    match number % 5:
        case 4:  # in evaluations too
            return Apply(lambda self, x: x + 0.1 * torch.randn(x.shape).to(x.dtype))
        case 0:
            return Apply(lambda self, x: F.dropout(x, 0.3, self.training))
        case 1:
            return nn.RReLU(inplace=number % 8 > 4)
        case 2:
            return Apply(lambda self, x: x + 0.1 * torch.rand_like(x) if self.training else x)
        case _:
            return Apply(
                lambda self, x: (
                    x
                    * torch.bernoulli(torch.full(x.shape[:1], 0.8))
                    .view(-1, *[1] * (x.dim() - 1))
                    .to(x.dtype)
                    if self.training
                    else x
                )
            )


def _pool(shape: Shape, number: int) -> nn.Module:
    if len(shape) == 2:
        return (
            nn.MaxPool1d(2, ceil_mode=True),
            nn.AdaptiveAvgPool1d(3),
            nn.LPPool1d(2, 1),
            nn.AvgPool1d(1),
        )[number % 4]
    return (
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Upsample((3, 3)),
        nn.AdaptiveMaxPool2d(1),
        nn.LocalResponseNorm(2),
        nn.Upsample((3, 3), mode="bilinear"),
    )[number % 6]


PIECES: Mapping[str, Piece] = {
    "linear": Piece(lambda shape, number: nn.Linear(shape[-1], width(number), bias=number % 3 > 0)),
    "weights": Piece(_weights),
    "bilinear": Piece(_bilinear),
    "calls": Piece(_calls),
    "parametrized": Piece(_parametrized, fp32_only=True),
    "spectral": Piece(_spectral, fp32_only=True, moves=True, itself=True),
    "layer norm": Piece(lambda shape, number: nn.LayerNorm(shape[number % len(shape) :])),
    "rms norm": Piece(lambda shape, number: nn.RMSNorm(shape[-1])),
    "group norm": Piece(lambda shape, number: nn.GroupNorm(1, shape[0], affine=number % 2 == 0)),
    "batch norm": Piece(_batch_norm, batches=True),
    "instance norm": Piece(_instance_norm, ranks=(2, 3)),
    "activation": Piece(_activation),
    "glu": Piece(lambda shape, number: nn.Sequential(nn.Linear(shape[-1], 8), nn.GLU(-1))),
    "function": Piece(_function, fp32_only=True),
    "strided": Piece(_strided, ranks=(2, 3)),
    "writes": Piece(_writes),
    "attention": Piece(_attention, ranks=(2,)),
    "attention dropout": Piece(partial(_attention, dropout=0.2), ranks=(2,), random=True),
    "sdpa": Piece(_sdpa, ranks=(2,)),
    "encoder": Piece(_encoder, ranks=(2,), random=True),
    "lstm": Piece(partial(_recurrent, kind=nn.LSTM), ranks=(2,)),
    "gru": Piece(partial(_recurrent, kind=nn.GRU), ranks=(2,)),
    "lstm dropout": Piece(partial(_recurrent, kind=nn.LSTM, dropout=0.2), ranks=(2,), random=True),
    "cell": Piece(_cell, ranks=(2,)),
    "conv1d": Piece(_conv1d, ranks=(2,)),
    "conv2d": Piece(_conv2d, ranks=(3,)),
    "pool": Piece(_pool, ranks=(2, 3), fp32_only=True),
    "table": Piece(_table),
    "sparse table": Piece(partial(_table, sparse=True)),
    "scaled by frequency": Piece(partial(_table, scale_grad_by_freq=True)),
    "buffers": Piece(_buffers, itself=True),
    "odd buffers": Piece(partial(_buffers, types=ODD_TYPES), itself=True),
    "changing": Piece(_changing, itself=True),
    "moving": Piece(_moving, itself=True, moves=True),
    "dropout": Piece(_dropout),
    "random": Piece(_random, random=True),
}
"""By name."""
