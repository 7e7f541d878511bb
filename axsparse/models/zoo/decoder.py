"""What the language models have in common: layers from embedding to head, ties, start values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axsparse.config.model_config import TextFamily
from axsparse.models.layer import Layer, Model, Tie
from axsparse.models.losses import linear_cross_entropy, logits_at_a_time

INIT_STD = 0.02
"""Standard deviation of the initial matrices (Radford et al. 2019)."""


@dataclass(frozen=True)
class DecoderParts:
    """The modules of a family, each made from its settings."""

    embedding: Callable[[Any], nn.Module]
    block: Callable[[Any], nn.Module]
    head: Callable[[Any], nn.Module]
    """Hands its weight to the loss, which computes the logits."""
    residual: Collection[str]
    """Names, within a block, of the matrices that write into the residual stream."""


def decoder(
    config: TextFamily, sequence_length: int, parts: DecoderParts, *, separate: bool = False
) -> Model:
    """A language model of `num_layers + 2` layers; the embedding's weight is `token.weight`.

    `sequence_length` is that of the data, and `separate` says that its samples tell documents
    apart; only the layers' costs depend on them.
    """
    s, inputs = sequence_length, (torch.long, torch.int32) if separate else (torch.long,)
    init = partial(init_parameter, config.num_layers, parts.residual)
    blocks = [
        Layer(f"block{i}", partial(parts.block, config), init=init)
        for i in range(config.num_layers)
    ]
    return Model(
        layers=[
            Layer("embed", partial(parts.embedding, config), kind="embedding", init=init),
            *blocks,
            Layer(
                "head",
                partial(parts.head, config),
                kind="head",
                init=init,
                flops=2 * s * config.hidden_size * config.vocab_size,  # The loss computes it.
            ),
        ],
        loss=linear_cross_entropy,
        loss_logits=lambda samples: logits_at_a_time(samples * s, config.vocab_size),
        example=lambda samples: tuple(
            torch.zeros(samples, s, dtype=dtype, device="meta") for dtype in inputs
        ),
        ties=[Tie("embed.token.weight", "head.weight")] if config.tie_embeddings else [],
        name=config.name,
        vocab_size=config.vocab_size,
    )


def init_parameter(
    num_layers: int,
    residual: Collection[str],
    name: str,
    shape: tuple[int, ...],
    generator: torch.Generator,
) -> Tensor:
    """Start values: matrices N(0, 0.02²), those of residual projections divided by √(2 · layers);
    gains of norms 1, biases 0."""
    if len(shape) == 1:
        is_gain = "norm" in name and name.endswith("weight")
        return torch.full(shape, 1.0 if is_gain else 0.0)
    std = INIT_STD / math.sqrt(2 * num_layers) if name in residual else INIT_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)
