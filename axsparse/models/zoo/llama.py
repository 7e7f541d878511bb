"""Decoders like Llama, Mistral and Qwen: rotary positions, pre-RMSNorm, grouped queries, SwiGLU.

Shapes: B sequences of a microbatch, S tokens, H hidden size, N heads of width D, K heads of keys
and values, V vocabulary.

Layers get `starts`, (B, S) integers, where the data tells documents apart: the position in the
sequence at which the document of each token begins. They pass them on to the next layer.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.model_config import LlamaConfig, head_width, key_value_heads
from axsparse.models.layer import Model
from axsparse.models.zoo.gpt import decoder


class Embedding(nn.Module):
    """Token embedding: (B, S) integers to (B, S, H)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, tokens: Tensor, starts: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        embedded: Tensor = self.token(tokens)
        return embedded if starts is None else (embedded, starts)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (B, S, H) to (B, S, H).

    Each of the K heads of keys and values serves N / K heads of queries (Ainslie et al. 2023).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, d, k = config.hidden_size, head_width(config), key_value_heads(config)
        self.width = d
        self.shared_by = config.num_heads // k
        self.q = nn.Linear(h, config.num_heads * d, bias=config.qkv_bias)
        self.k = nn.Linear(h, k * d, bias=config.qkv_bias)
        self.v = nn.Linear(h, k * d, bias=config.qkv_bias)
        self.o = nn.Linear(config.num_heads * d, h, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(d, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.frequencies = rotary_frequencies(config)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        heads = (b, s, -1, self.width)
        query = self.q_norm(self.q(x).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k(x).view(heads)).transpose(1, 2)
        value = self.v(x).view(heads).transpose(1, 2)
        cosine, sine = self.turns(x, starts)
        mixed = F.scaled_dot_product_attention(
            turned_by_position(query, cosine, sine),
            self._for_each_query(turned_by_position(key, cosine, sine)),
            self._for_each_query(value),
            attn_mask=None if starts is None else visible(starts),
            is_causal=starts is None,
        )
        projected: Tensor = self.o(mixed.transpose(1, 2).reshape(b, s, -1))
        return projected

    def turns(self, x: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, computed in fp32: both (S, D / 2), or with
        `starts`, from which positions then count, (B, 1, S, D / 2)."""
        positions = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
        if starts is not None:
            positions = (positions - starts).unsqueeze(1)
        angles = positions.unsqueeze(-1) * self.frequencies.to(x.device, non_blocking=True)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _for_each_query(self, shared: Tensor) -> Tensor:
        """Keys or values repeated for the queries that share them: (B, K, S, D) to (B, N, S, D)."""
        return shared if self.shared_by == 1 else shared.repeat_interleave(self.shared_by, dim=1)


def visible(starts: Tensor) -> Tensor:
    """Which tokens each token sees: those of its document up to itself. (B, S) to (B, 1, S, S)."""
    same = starts.unsqueeze(2) == starts.unsqueeze(1)
    return same.tril().unsqueeze(1)


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """The angle by which each pair of a head's entries turns from one position to the next.

    Returns (D / 2,) in fp32 on the CPU. Pair i turns by θ^(−2i/D) (Su et al. 2021). With the
    scaling of Llama 3, wavelengths above `rope_original_length / rope_low_factor` become
    `rope_factor` times as long, those below `rope_original_length / rope_high_factor` stay, and
    in between the two rules are mixed by the share of `rope_original_length / wavelength` in the
    way from one factor to the other.
    """
    pairs = torch.arange(0, head_width(config), 2, dtype=torch.float32, device="cpu")
    plain: Tensor = 1.0 / (config.rope_theta ** (pairs / head_width(config)))
    if config.rope_factor == 1:
        return plain
    low, high, length = (
        config.rope_low_factor,
        config.rope_high_factor,
        config.rope_original_length,
    )
    wavelength = 2 * math.pi / plain
    stays = ((length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - stays) * plain / config.rope_factor + stays * plain


def turned_by_position(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Each pair (i, i + D/2) of a head's entries, turned by its angle: (…, S, D) to (…, S, D)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Swiglu(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020): (B, S, H) to (B, S, H)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        h, inner = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(h, inner, bias=False)
        self.up = nn.Linear(h, inner, bias=False)
        self.down = nn.Linear(inner, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One transformer block: (B, S, H) to (B, S, H), and `starts` to themselves."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Swiglu(config)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x), starts)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out if starts is None else (out, starts)


def llama(config: LlamaConfig, sequence_length: int, *, separate: bool = False) -> Model:
    """The Llama of a configuration (`decoder`)."""
    parts = (Embedding, Block, partial(nn.RMSNorm, eps=config.norm_eps))
    residual = ("attention.o.weight", "mlp.down.weight")
    return decoder(config, sequence_length, parts, residual, separate=separate)
