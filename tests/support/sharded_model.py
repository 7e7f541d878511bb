"""A model of a user's own whose modules are sharded over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from support.runs import random_init, summed_loss
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model, TpStyle


class Attention(nn.Module):
    """Heads by three separate matrices, which takes the number of heads from the tensor."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        b, s, _ = x.shape
        each = [
            m(x).view(b, s, -1, self.size).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*each)
        return self.out(mixed.transpose(1, 2).reshape(b, s, -1))


class Own(nn.Module):
    """A block of attention and a gated MLP, with a module between its matrices."""

    def __init__(
        self,
        width: int = 32,
        size: int = 8,
        dropout: float = 0.0,
        *,
        inner: Callable[[], nn.Module] = nn.Identity,
        change: Callable[[Any], object] = lambda own: None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, size)
        self.up, self.gate = (nn.Linear(width, 48) for _ in range(2))
        self.down = nn.Linear(48, width)
        self.dropout = nn.Dropout(dropout)
        self.inner = inner()
        change(self)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm(x))
        hidden = self.inner(self.dropout(F.silu(self.gate(x)) * self.up(x)))
        return x + self.down(hidden)


HEAD = TpStyle("colwise", unit=8)
PLAN: dict[str, TpStyle | str] = {
    **{f"attention.{name}": HEAD for name in ("query", "key", "value")},
    "attention.out": TpStyle("rowwise", unit=8),
    **{"up": "colwise", "gate": "colwise", "down": "rowwise"},
}


def own_model(**settings: Any) -> Model:
    """Blocks whose modules are sharded by `Layer.tp_plan`, between layers that are not."""
    plan, init = settings.pop("plan", PLAN), settings.pop("init", random_init)
    build = partial(Own, **settings)
    return Model(
        [
            Layer("first", partial(nn.Linear, 16, 64), init=random_init),
            Layer("fold", partial(nn.Unflatten, 1, (2, 32))),
            Layer("block0", build, init=init, tp_plan=plan),
            Layer("block1", build, init=init, tp_plan=plan),
            Layer("flat", nn.Flatten),
            Layer("out", partial(nn.Linear, 64, 5), kind="head", init=random_init),
        ],
        loss=summed_loss,
    )
