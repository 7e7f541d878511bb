"""Continues a text with a trained model, on one process and without a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from axsparse.config.model_config import TextFamily
from axsparse.config.schema import sample_length
from axsparse.models.layer import as_tuple
from axsparse.runtime.errors import ConfigError
from axsparse.training.saved_model import SavedModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen among those that the model thinks likely."""

    temperature: float = 0.0
    """Logits are divided by it before a token is drawn; 0 takes the most likely one."""
    top_k: int | None = None
    """Only so many of the most likely tokens may be drawn; None: all."""
    seed: int = 0


def refuse_textless(saved: SavedModel) -> None:
    """ConfigError if the model does not predict tokens."""
    family = saved.loaded.config.model
    if not isinstance(family, TextFamily):
        raise ConfigError(
            f"generate: {saved.checkpoint.path} is of model.name {family.name}, which writes no "
            "text; name a run of a gpt or a llama"
        )


def continuation(
    saved: SavedModel, prompt: Sequence[int], tokens: int, end: int, sampling: Sampling
) -> Iterator[int]:
    """At most `tokens` tokens that follow the prompt, up to and without the token `end`.

    The prompt has at least one token. The model sees no more of the text than the last tokens
    that fit into one sample of its training. Equal arguments give equal tokens.
    """
    window = sample_length(saved.loaded.config)
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    for _ in range(tokens):
        token = _chosen(_next_logits(saved, text[-window:]), sampling, generator)
        if token == end:
            return
        text.append(token)
        yield token


@torch.no_grad()
def _next_logits(saved: SavedModel, text: Sequence[int]) -> Tensor:
    """The logits of the token that follows, (V,) in fp32."""
    outputs: tuple[Tensor, ...] = (torch.tensor([text]),)
    for layer, module in zip(saved.model.layers, saved.modules, strict=True):
        outputs = as_tuple(layer.name, module(*outputs))
    hidden, weight = outputs  # The head leaves this product to the loss.
    return F.linear(hidden[0, -1], weight).float()


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # In fp64 the largest difference over a small temperature is no overflow.
    shares = ((logits.double() - logits.max()) / sampling.temperature).softmax(dim=0)
    return int(torch.multinomial(shares, 1, generator=generator))
