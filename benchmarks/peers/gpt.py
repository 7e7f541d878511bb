"""The model, its start values, masks and tokens: the same for every contender, in every layout.

Shapes: B sequences, T tokens, H width, V words.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.workload import SEED, SPARSITY, Precision, Size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVIATION = 0.02
"""Of the normal distribution that matrices are drawn from."""


class Embedding(nn.Module):
    """Token ids (B, T) to the residual stream (B, T, H)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.word = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.tokens, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.word(tokens) + self.place.weight[: tokens.shape[1]]
        return found


class Block(nn.Module):
    """Attention and a hidden layer, each normalised before: (B, T, H) to the same shape."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, stream: Tensor) -> Tensor:
        batch, tokens, width = stream.shape
        parts = self.attend(self.norm1(stream)).chunk(3, dim=-1)
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.mix(seen.transpose(1, 2).reshape(batch, tokens, width))
        hidden = F.gelu(self.widen(self.norm2(stream)), approximate="tanh")
        result: Tensor = stream + self.narrow(hidden)
        return result


class Head(nn.Module):
    """The residual stream (B, T, H) to logits (B, T, V)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.words = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.words(self.norm(stream))
        return logits


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of one microbatch in nats, the mean over its tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The same, summed over the tokens."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def layer_name(size: Size, index: int) -> str:
    if index == 0:
        return "embedding"
    return "head" if index == size.layers - 1 else f"block{index - 1}"


def empty_layer(size: Size, index: int) -> nn.Module:
    """A layer whose parameters have no values yet, in fp32, on the device in force."""
    if index == 0:
        return Embedding(size)
    return Head(size) if index == size.layers - 1 else Block(size)


def is_pruned(name: str) -> bool:
    """Whether a parameter, by its global name, is a matrix of a block."""
    return name.startswith("block") and name.endswith(".weight") and ".norm" not in name


def drawn(size: Size, name: str, shape: tuple[int, ...]) -> Tensor:
    """Start values of a parameter in fp32, a function of its global name alone."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {name}".encode()))
    ends_branch = name.endswith(("mix.weight", "narrow.weight"))
    deviation = DEVIATION / (2 * size.blocks) ** 0.5 if ends_branch else DEVIATION
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def start_values(size: Size, name: str, shape: tuple[int, ...], precision: Precision) -> Tensor:
    """Start values in fp32, already rounded to the precision of the weights.

    Some contenders make their fp32 masters of rounded weights, so all start from these.
    """
    values = drawn(size, name, shape)
    return values.copy_(values.to(DTYPES[precision]))


def kept_mask(size: Size, name: str, shape: tuple[int, ...], precision: Precision) -> Tensor:
    """True where an entry stays: all but the 90 % of smallest start values, by magnitude.

    Among equal magnitudes the first ones stay, as with axsparse's method `magnitude`.
    """
    magnitudes = start_values(size, name, shape, precision).abs_().flatten().numpy()
    dropped = round(SPARSITY * magnitudes.size)
    least = np.partition(magnitudes, dropped)[dropped]
    mask = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    mask[equal[: magnitudes.size - dropped - mask.sum()]] = True
    return torch.from_numpy(mask).view(shape)


def make_layer(size: Size, index: int, precision: Precision) -> nn.Module:
    """A layer with its start values, in the precision of the run; nothing is pruned yet."""
    with torch.device("meta"):
        layer = empty_layer(size, index)
    layer = layer.to_empty(device="cpu").to(DTYPES[precision])
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            full = f"{layer_name(size, index)}.{name}"
            parameter.copy_(start_values(size, full, tuple(parameter.shape), precision))
    return layer


def make_layers(size: Size, indices: range, precision: Precision) -> dict[str, nn.Module]:
    """Consecutive layers by name, in order."""
    return {layer_name(size, index): make_layer(size, index, precision) for index in indices}


def masks_of(
    size: Size, layers: dict[str, nn.Module], precision: Precision
) -> dict[nn.Parameter, Tensor]:
    """The masks of the parameters of some layers that are pruned."""
    return {
        parameter: kept_mask(size, f"{layer}.{name}", tuple(parameter.shape), precision)
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
        if is_pruned(f"{layer}.{name}")
    }


class Stream:
    """Sequences of tokens from the source files of Python's own standard library.

    Two adjacent bytes are one number, and its remainder by the vocabulary is the token. Step s
    has the sequences s·M to s·M + M − 1, where M is the number of microbatches, in this order.
    """

    def __init__(self, size: Size, steps: int) -> None:
        self._size = size
        self.sequences = steps * size.microbatches
        wanted = self.sequences * size.tokens + 1
        pairs = np.frombuffer(_library(2 * wanted), dtype="<u2", count=wanted)
        self._tokens = torch.from_numpy((pairs % size.vocabulary).astype(np.int64))
        self.digest = f"{zlib.crc32(self._tokens.numpy().tobytes()):08x}"

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (1, T) each: a target is the token after the input."""
        first, tokens = number * self._size.tokens, self._size.tokens
        window = self._tokens[first : first + tokens + 1].unsqueeze(0)
        return window[:, :-1], window[:, 1:]

    def share(self, step: int, replica: int, replicas: int) -> list[tuple[Tensor, Tensor]]:
        """The microbatches of a replica, a contiguous part of the step's."""
        count = self._size.microbatches // replicas
        first = step * self._size.microbatches + replica * count
        return [self.sequence(number) for number in range(first, first + count)]


@functools.cache
def _library(wanted: int) -> bytes:
    """So many bytes of source text, from the beginning again where there is too little."""
    text = bytearray()
    for part in _files():
        text += part
        if len(text) >= wanted:
            break
    return bytes((text * -(-wanted // len(text)))[:wanted])


def _files() -> Iterator[bytes]:
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield path.read_bytes()
