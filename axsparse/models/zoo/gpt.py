"""Decoders like GPT-3.

GPTs have learned positions, pre-LayerNorm, GELU, and a tied or a separate head.

Shapes: B sequences of a microbatch, S tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.hf_config import CONFIG_FILE, from_gpt2, read_json, reject_other_sizes
from axsparse.config.model_config import GptConfig
from axsparse.models.layer import Layer, Model, Tie, TpStyle
from axsparse.models.losses import linear_cross_entropy, logits_at_a_time
from axsparse.models.start_weights import WeightFile, is_left_over, start_from

INIT_STD = 0.02
"""Standard deviation of the initial matrices (Radford et al. 2019)."""


class Head(nn.Module):
    """The final norm: (B, S, H) to (B, S, H), returned with the weight (V, H) of the projection.

    `linear_cross_entropy` computes the logits from the two, some of them at a time.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.norm(x), self.weight


RESIDUAL = ("attention.proj.weight", "fc2.weight")
"""The matrices of a block that write into the residual stream."""


def init_parameter(
    num_layers: int, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Start values: matrices N(0, 0.02²), residual projections divided by √(2 · layers); gains of
    norms 1, biases 0."""
    if len(shape) == 1:
        is_gain = "norm" in name and name.endswith("weight")
        return torch.full(shape, 1.0 if is_gain else 0.0)
    std = INIT_STD / math.sqrt(2 * num_layers) if name in RESIDUAL else INIT_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


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
        self.head_size = config.hidden_size // config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        each = self.qkv(x).view(b, s, 3, -1, self.head_size)  # -1: the heads that are here
        # One transpose each, so that a backward lays the gradients out in one pass.
        query, key, value = (part.transpose(1, 2) for part in each.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(b, s, -1))
        return out


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


def gpt(config: GptConfig, sequence_length: int) -> Model:
    """A GPT of `num_layers + 2` layers; the embedding's weight is `token.weight`.

    `sequence_length` is the data's; only the layers' costs depend on it.
    """
    s, init = sequence_length, partial(init_parameter, config.num_layers)
    size = config.hidden_size // config.num_heads
    plan: dict[str, TpStyle | str] = {
        "attention.qkv": TpStyle("colwise", packed=3, unit=size),
        "attention.proj": TpStyle("rowwise", unit=size),
        "fc1": "colwise",
        "fc2": "rowwise",
    }
    blocks = [
        Layer(f"block{i}", partial(Block, config), init=init, tp_plan=plan)
        for i in range(config.num_layers)
    ]
    return Model(
        layers=[
            Layer(
                "embed",
                partial(Embedding, config),
                kind="embedding",
                init=init,
                tp_plan={"token": "vocabulary"},
            ),
            *blocks,
            Layer(
                "head",
                partial(Head, config),
                kind="head",
                init=init,
                flops=2 * s * config.hidden_size * config.vocab_size,  # The loss computes it.
                tp_plan={"weight": "vocabulary"},
            ),
        ],
        loss=linear_cross_entropy,
        loss_logits=lambda samples: logits_at_a_time(samples * s, config.vocab_size),
        example=lambda samples: (torch.zeros(samples, s, dtype=torch.long, device="meta"),),
        ties=[Tie("embed.token.weight", "head.weight")] if config.tie_embeddings else [],
        name=config.name,
        vocab_size=config.vocab_size,
    )


# -- files of Hugging Face's GPT-2 ----------------------------------------------------------
#
# Matrices of the blocks are transposed there: (inputs, outputs). Checkpoints of the body alone,
# such as OpenAI's, leave out the prefix. A tied head is stored as the embedding only.

PREFIX = "transformer."
_OUTSIDE = {"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"}
_INSIDE = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "norm2": "ln_2",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}


def gpt2_name(name: str, prefix: str = PREFIX) -> str:
    """The name there of a global name; KeyError for one that no model has."""
    if name == "head.weight":
        return "lm_head.weight"
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{prefix}{_OUTSIDE[module]}.{kind}"
    block, _, part = module.partition(".")
    return f"{prefix}h.{block.removeprefix('block')}.{_INSIDE[part]}.{kind}"


def turned(name: str, tensor: Tensor) -> Tensor:
    """A GPT's tensor of a global name, transposed if the two libraries store it differently.

    The same function converts in both directions.
    """
    return tensor.t() if name.startswith("block") and tensor.dim() == 2 else tensor


def start_from_gpt2(model: Model, file: WeightFile, config: GptConfig) -> Model:
    """A copy of a model that starts at a file, whose names are ours or transformers'.

    In the latter case the config.json next to the file, if there is one, is compared with the
    settings: no shape shows the number of heads, for example.

    Raises ConfigError if the settings differ from the file's, DataError if the file is of a model
    that ours cannot represent, and the errors of `start_from`.
    """
    if "embed.token.weight" in file.shapes:
        return start_from(model, file, new=config.new, depth="model.num_layers")
    beside = file.path.parent / CONFIG_FILE
    if beside.exists():
        reject_other_sizes(beside, from_gpt2(beside, read_json(beside)), config)
    has_prefix = any(name.startswith(PREFIX) for name in file.shapes)
    return start_from(
        model,
        file,
        named=partial(gpt2_name, prefix=PREFIX if has_prefix else ""),
        convert=turned,
        ignored=partial(is_left_over, file.shapes),
        new=config.new,
        depth=f"n_layer in {CONFIG_FILE}" if beside.exists() else "model.num_layers",
    )
