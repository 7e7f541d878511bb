"""Decoders like GPT-3: learned positions, pre-LayerNorm, GELU, and a tied or a separate head.

Shapes: B sequences of a microbatch, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.model_config import GptConfig
from axsparse.models.layer import Model
from axsparse.models.zoo.decoder import DecoderParts, decoder


class Embedding(nn.Module):
    """Token plus position embedding: (B, S) integers to (B, S, H)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.sequence_length, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        dropped: Tensor = self.dropout(embedded)
        return dropped


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, S, H) to (B, S, H)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv: Tensor = self.qkv(x).view(b, s, 3, self.num_heads, h // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(b, s, h))
        return projected


class Block(nn.Module):
    """One transformer block: (B, S, H) to (B, S, H)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.norm1 = nn.LayerNorm(h)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(h)
        self.fc1 = nn.Linear(h, 4 * h)
        self.fc2 = nn.Linear(4 * h, h)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = F.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.fc2(hidden))
        return out


class Head(nn.Module):
    """Final LayerNorm: (B, S, H) to (B, S, H), returned with the weight (V, H) of the projection.

    `linear_cross_entropy` computes the logits from the two, some of them at a time.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), self.weight


PARTS = DecoderParts(Embedding, Block, Head, residual=("attention.proj.weight", "fc2.weight"))


def gpt(config: GptConfig, sequence_length: int) -> Model:
    """The GPT of a configuration (`decoder`)."""
    return decoder(config, sequence_length, PARTS)
