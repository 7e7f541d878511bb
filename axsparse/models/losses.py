"""Cross entropy of logits, and of a large vocabulary, whose logits never exist all at once.

Shapes: T tokens, H hidden size, V vocabulary, C words of one chunk of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from axsparse.models.layer import LossFunction
from axsparse.runtime.targets import IGNORED

CHUNK_LOGITS = 2**21
"""Logits that exist at a time: 8 MB in fp32, which fits into caches. Changing it changes bits."""
GPU_CHUNK_LOGITS = 2**25
"""The same on a GPU, where launches count and not caches: 128 MB in fp32. Not measured."""
COMPILED_LOGITS = 2**30
"""Logits that a fused loss keeps from its forward to its backward on a GPU: 2 GB in bf16."""
CHUNK_WORDS = 1_024
"""Least number of words in a chunk; narrower matrix products are inefficient."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over the tokens; fp32 whatever the logits are."""
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`summed_cross_entropy(hidden @ weight.T, targets)` from (…, H), (V, H) and (…).

    More logits than one chunk has are computed by chunks of words, and again in the backward.
    Each row of the weight's gradient is one product over all tokens, never a sum of rounded
    parts. Raises torch's own error for a target that is not a word, on a GPU in a later call.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if flat.shape[0] * weight.shape[0] <= most_logits(hidden.device):
        return summed_cross_entropy(F.linear(flat, weight), targets)
    in_chunks: Callable[..., Tensor] = _ChunkedCrossEntropy.apply
    return in_chunks(flat, weight, targets.reshape(-1))


def compiled(loss: LossFunction) -> LossFunction:
    """The loss as `pipeline.compile` has it: `linear_cross_entropy` fused by torch.compile, any
    other as it is.

    The fused one keeps the logits of a microbatch in the type of the weight, up to
    `COMPILED_LOGITS`, and reads them once in each direction; with more it computes as ever.
    """
    if loss is not linear_cross_entropy:
        return loss
    fused = torch.compile(_unchunked_cross_entropy, dynamic=False)

    def fused_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if _is_on_host(hidden) or targets.numel() * weight.shape[0] > COMPILED_LOGITS:
            return linear_cross_entropy(hidden, weight, targets)
        result: Tensor = fused(hidden, weight, targets)
        return result

    return fused_cross_entropy


def _is_on_host(hidden: Tensor) -> bool:
    return hidden.is_cpu


def _unchunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return summed_cross_entropy(F.linear(hidden, weight), targets)


def logits_at_a_time(tokens: int, words: int) -> int:
    """How many logits `linear_cross_entropy` holds at a time on a CPU, of so many words."""
    if tokens * words <= CHUNK_LOGITS:
        return tokens * words
    return tokens * min(words, _words_of_chunk(tokens, CHUNK_LOGITS))


def _words_of_chunk(tokens: int, most: int) -> int:
    return max(CHUNK_WORDS, most // tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """With the logits z = hidden · weightᵀ, (T, V), and the targets y, (T,):

    loss   = Σ_t log Σ_v exp z[t, v] − z[t, y[t]]
    ∂ / ∂z = softmax(z) − onehot(y), rounded to the type of z
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        counts = targets != IGNORED
        reject_foreign_words(targets, weight.shape[0], ignored=IGNORED)
        log_total = torch.full_like(targets, -torch.inf, dtype=torch.float32)
        at_target = torch.zeros_like(log_total)
        for start, stop in _chunks(weight, targets):
            logits = F.linear(hidden, weight[start:stop]).float()
            log_total = torch.logaddexp(log_total, logits.logsumexp(dim=1))
            here, column = _among(targets, start, stop)
            at_target += here * logits.gather(1, column).squeeze(1)
            del logits  # Freed before the next chunk is computed.
        ctx.save_for_backward(hidden, weight, targets, log_total)
        return torch.where(counts, log_total - at_target, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, log_total = ctx.saved_tensors
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        # The sum over many chunks of words is kept in fp32.
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        factor = ((targets != IGNORED) * gradient).unsqueeze(1)
        for start, stop in _chunks(weight, targets):
            logits = F.linear(hidden, weight[start:stop]).float()
            dense = logits.sub_(log_total.unsqueeze(1)).exp_()
            here, column = _among(targets, start, stop)
            dense.scatter_add_(1, column, -here.unsqueeze(1).float())
            chunk = dense.mul_(factor).to(weight.dtype)
            del logits, dense  # Freed before the products need memory.
            if weight_gradient is not None:
                torch.mm(chunk.t(), hidden, out=weight_gradient[start:stop])
            if hidden_gradient is not None:
                hidden_gradient += chunk @ weight[start:stop]
            del chunk
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, None


def reject_foreign_words(tokens: Tensor, words: int, ignored: int | None = None) -> None:
    """Torch's RuntimeError for a token that is no word of a vocabulary, nor `ignored`; on a GPU a
    later call raises it. Batches name the sample where they are read (`data/batches.py`)."""
    are_words = (tokens >= 0) & (tokens < words)
    if ignored is not None:
        are_words |= tokens == ignored
    # To read the answer from a GPU would block the host in every microbatch.
    torch._assert_async(are_words.all(), f"a token is no word of a vocabulary of {words}")


def most_logits(device: torch.device) -> int:
    """How many logits exist at a time."""
    return CHUNK_LOGITS if device.type == "cpu" else GPU_CHUNK_LOGITS


def _chunks(weight: Tensor, targets: Tensor) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each chunk of words."""
    words = _words_of_chunk(targets.numel(), most_logits(weight.device))
    for start in range(0, weight.shape[0], words):
        yield start, min(start + words, weight.shape[0])


def _among(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Which tokens have a target in a chunk of words, (T,), and its column there, (T, 1)."""
    here = (targets >= start) & (targets < stop)
    return here, (targets - start).clamp(0, stop - start - 1).unsqueeze(1)
