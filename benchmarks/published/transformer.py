"""The compute, traffic and memory of a transformer's parts, by formula: embedding, blocks and head.

Every number is for one microbatch on one of `tensor` devices that share each layer, as in Shoeybi
et al. (2019): matrices and attention heads are divided, norms, dropouts and residuals are divided
only under sequence parallelism. Work is counted in two sums, flops of matrix products and bytes
that any kernel reads and writes: large products take the time of their flops; small and thin ones,
and everything between them, take the time of their bytes.

In formulas s is the sequence, b the microbatch, h the hidden size, a the number of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Family = Literal["gpt", "llama"]
Recompute = Literal["none", "selective", "full"]
VALUE = 2
"""Bytes of an activation."""
SCORE_BYTES = 11
"""Bytes moved for each attention score that is not fused: written by the product (2), read and
written by the softmax (4) and by the dropout with its mask (5); the product with the values reads
its operands like every product."""
LOSS_BYTES = 16
"""Bytes moved for each logit by the loss in the forward: a copy in fp32, its maximum, exponentials
and their sum. The backward is counted as twice that, like every other."""


class Work(NamedTuple):
    """The compute and traffic of a device."""

    flops: float = 0.0
    moved: float = 0.0
    """Bytes that kernels read and write in the device's memory."""

    def plus(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved + other.moved)

    def times(self, factor: float) -> Work:
        return Work(factor * self.flops, factor * self.moved)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes of a decoder-only transformer."""

    family: Family
    """`gpt`: two matrices in the MLP, learned positions, dropout; `llama`: three matrices, rotary
    positions, no dropout."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than `heads` under grouped-query attention."""
    head_dim: int
    ffn: int
    """Width of the MLP."""
    vocabulary: int
    sequence: int
    tied: bool
    """Whether embedding and head share one weight."""
    fused_attention: bool
    """Whether the scores stay on the chip (FlashAttention)."""
    sequence_parallel: bool = False
    """Whether norms, dropouts and residuals are divided over the tensor group by positions
    (Korthikanti et al., 2022)."""

    @property
    def matrices(self) -> int:
        """Matrices of an MLP: gate, up and down of a llama, up and down of a gpt."""
        return 3 if self.family == "llama" else 2

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_params(self) -> int:
        """Entries of a block's matrices; biases and norms are some thousandths of them."""
        attention = 2 * self.hidden * (self.attention_width + self.kv_width)
        return attention + self.matrices * self.hidden * self.ffn

    @property
    def word_params(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def position_params(self) -> int:
        return self.sequence * self.hidden if self.family == "gpt" else 0

    @property
    def num_params(self) -> int:
        """All entries; a tied weight counts once."""
        words = self.word_params * (1 if self.tied else 2)
        return self.layers * self.block_params + words + self.position_params

    # -- flops of the full model, for a sample ----------------------------------------------

    @property
    def block_flops(self) -> float:
        """Flops of a sample's forward through a block, with all of the scores."""
        return self.sequence * (
            2.0 * self.block_params + 4.0 * self.sequence * self.attention_width
        )

    @property
    def head_flops(self) -> float:
        return 2.0 * self.sequence * self.vocabulary * self.hidden

    @property
    def model_flops(self) -> float:
        """Flops of a sample's forward and backward without recomputation."""
        return 3 * (self.layers * self.block_flops + self.head_flops)

    @property
    def megatron_flops(self) -> float:
        """96 s l h² (1 + s / 6h + V / 16 l h), Narayanan et al. (2021), with full recomputation.

        For a gpt whose heads fill the hidden size this is exactly that formula.
        """
        return 4 * self.layers * self.block_flops + 3 * self.head_flops

    # -- work of the parts, for a microbatch on one device -----------------------------------

    def _shares(self, tensor: int) -> int:
        """Over how many devices norms, dropouts and residuals are divided."""
        return tensor if self.sequence_parallel else 1

    def block(self, samples: int, tensor: int) -> Work:
        """The forward of a block."""
        tokens, h = samples * self.sequence, self.hidden
        queries, values = self.attention_width / tensor, self.kv_width / tensor
        width = self.ffn / tensor
        widened = (self.matrices - 1) * width
        work = self.attention(samples, tensor)
        work = work.plus(_product(tokens, h, queries + 2 * values))
        work = work.plus(_product(tokens, queries, h))
        work = work.plus(_product(tokens, h, widened))
        work = work.plus(_product(tokens, width, h))
        return work.plus(Work(0.0, tokens * self._pointwise(tensor)))

    def _pointwise(self, tensor: int) -> float:
        """Bytes that kernels other than products move for a token in a block's forward."""
        h, width = self.hidden / self._shares(tensor), self.ffn / tensor
        heads = (self.attention_width + 2 * self.kv_width) / tensor
        # Two norms read and write; two sums read both addends, write, and a dropout has a mask.
        if self.family == "gpt":
            return (2 * 4 + 2 * 7) * h + 2 * VALUE * (heads + width)
        return (2 * 4 + 2 * 6) * h + 2 * VALUE * heads + 3 * VALUE * width

    def attention(self, samples: int, tensor: int) -> Work:
        """The scores and their product with the values: what selective recomputation repeats."""
        tokens, width = samples * self.sequence, self.attention_width / tensor
        operands = VALUE * tokens * (4 * width)
        if self.fused_attention:
            # A causal kernel skips the half of the scores that the mask hides.
            return Work(2.0 * tokens * self.sequence * width, operands)
        scores = samples * self.heads / tensor * self.sequence**2
        return Work(4.0 * tokens * self.sequence * width, operands + SCORE_BYTES * scores)

    def embedding(self, samples: int) -> Work:
        """The forward of the embedding: rows are read, added and written."""
        return Work(0.0, 5 * VALUE * samples * self.sequence * self.hidden)

    def head(self, samples: int, tensor: int) -> Work:
        """The forward of the last norm, the head and the loss."""
        tokens, words = samples * self.sequence, self.vocabulary / tensor
        work = _product(tokens, self.hidden, words)
        return work.plus(Work(0.0, 4 * tokens * self.hidden + LOSS_BYTES * tokens * words))

    # -- memory ------------------------------------------------------------------------------

    def held(self, samples: int, tensor: int, recompute: Recompute) -> float:
        """Bytes of a block's activations from its forward to its backward.

        For a gpt: s b h (10 + 24 / t + 5 a s / h t) (Korthikanti et al., 2022, table 2), without
        the last term if scores are recomputed or never stored, 2 s b h if all is recomputed;
        sequence parallelism divides the first term as well.
        """
        tokens, h = samples * self.sequence, self.hidden / self._shares(tensor)
        if recompute == "full":
            return float(VALUE * tokens * h)
        heads = (2 * self.attention_width + 2 * self.kv_width) / tensor
        if self.family == "gpt":
            whole, parts = 10 * h, VALUE * (heads + 2 * self.ffn / tensor)
        else:
            whole, parts = 8 * h, VALUE * (heads + 3 * self.ffn / tensor)
        bytes_ = tokens * (whole + parts)
        if recompute == "none" and not self.fused_attention:
            bytes_ += 5 * samples * self.heads / tensor * self.sequence**2
        return float(bytes_)


def _product(rows: float, inner: float, outer: float) -> Work:
    """A matrix product of half-precision operands that are each read or written once."""
    moved = VALUE * (rows * inner + inner * outer + rows * outer)
    return Work(2.0 * rows * inner * outer, moved)
