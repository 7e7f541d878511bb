"""Cross entropy of logits, and of a large vocabulary, whose logits never exist all at once; and the
divergence from the logits of a teacher.

Shapes: T tokens, H hidden size, V vocabulary, C words of one chunk of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    Hidden states of another type, as Mamba's residuals in fp32, are rounded to the weight's.
    """
    flat = _rows(hidden, weight)
    if flat.shape[0] * weight.shape[0] <= most_logits(hidden.device):
        return _unchunked_cross_entropy(flat, weight, targets)
    in_chunks: Callable[..., Tensor] = _ChunkedLoss.apply
    return in_chunks(flat, weight, None, None, flat_targets(targets), 0.0, 1.0)


SUMS = (summed_cross_entropy, linear_cross_entropy)
"""The losses that are known to be sums without state."""


def _rows(hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """Hidden states (…, H) or logits as rows, in the type of the weight that multiplies them."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if weight is None else rows.to(weight.dtype)


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
    return summed_cross_entropy(F.linear(_rows(hidden, weight), weight), targets)


def logits_at_a_time(tokens: int, words: int) -> int:
    """How many logits `linear_cross_entropy` holds at a time on a CPU, of this many words."""
    return tokens * min(words, max(CHUNK_WORDS, CHUNK_LOGITS // tokens))


# -- the divergence from a teacher ------------------------------------------------------------


def distillation(
    outputs: Sequence[Tensor],
    taught: Sequence[Tensor],
    targets: Tensor,
    *,
    share: float,
    temperature: float,
) -> Tensor:
    """The loss of a model that is to match a teacher, summed over the targets (…), in nats.

    `outputs` and `taught` are of the model and of the teacher: hidden states (…, H) and the weight
    (V, H) that makes logits of them, or logits (…, V). H may differ, V may not. With their logits z
    and u, the share α and the temperature τ (Hinton et al. 2015, equation 4):

    loss = (1 − α) · cross entropy(z, targets) + α · τ² · KL(softmax(u / τ) ‖ softmax(z / τ))

    The logits exist by chunks of words, and are computed again in the backward. The teacher gets
    no gradient.
    """
    flat = [
        (_rows(first, *weights), *(weights or (None,))) for first, *weights in (outputs, taught)
    ]
    in_chunks: Callable[..., Tensor] = _ChunkedLoss.apply
    return in_chunks(*flat[0], *flat[1], flat_targets(targets), share, temperature)


class _ChunkedLoss(torch.autograd.Function):
    """With z, u, α and τ as in `distillation`, y the targets, (T,), and α = 0 without a teacher:

    cross entropy = log Σ_v exp z[t, v] − z[t, y[t]]
    KL     = Σ_v q[t, v] · (u − z)[t, v] / τ − log Σ_v exp(u / τ) + log Σ_v exp(z / τ),
             q = softmax(u / τ)
    ∂ / ∂z = (1 − α) · (softmax(z) − onehot(y)) + α · τ · (softmax(z / τ) − q)
    """

    # Reason: autograd finds tensors among the arguments alone.
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        taught: Tensor | None,
        teaching: Tensor | None,
        targets: Tensor,
        share: float,
        temperature: float,
    ) -> Tensor:
        counts = targets != IGNORED
        words = hidden.shape[1] if weight is None else weight.shape[0]
        reject_foreign_words(targets, words, ignored=IGNORED)
        hard = torch.full_like(targets, -torch.inf, dtype=torch.float32)
        soft, known = hard.clone(), hard.clone()
        at_target, apart = torch.zeros_like(hard), torch.zeros_like(hard)
        for start, stop in _chunks(words, targets):
            logits = _logits(hidden, weight, start, stop)
            if share < 1:
                hard = torch.logaddexp(hard, logits.logsumexp(dim=1))
                here, column = _among(targets, start, stop)
                at_target += here * logits.gather(1, column).squeeze(1)
            if taught is not None:
                logits = logits / temperature
                soft = torch.logaddexp(soft, logits.logsumexp(dim=1))
                hints = _logits(taught, teaching, start, stop) / temperature
                before, known = known, torch.logaddexp(known, hints.logsumexp(dim=1))
                # The mean under the words so far is weighted anew by those of this chunk.
                chances = (hints - known.unsqueeze(1)).exp_()
                apart = apart * (before - known).exp() + chances.mul_(hints.sub_(logits)).sum(dim=1)
                del hints, chances
            del logits  # Freed before the next chunk is computed.
        ctx.save_for_backward(hidden, weight, taught, teaching, targets, hard, soft, known)
        ctx.share, ctx.temperature = share, temperature
        total = hard - at_target
        if taught is not None:
            divergence = share * temperature**2 * (apart - known + soft)
            total = divergence + (1 - share) * total if share < 1 else divergence
        return torch.where(counts, total, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, taught, teaching, targets, hard, soft, known = ctx.saved_tensors
        share, temperature = ctx.share, ctx.temperature
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # The sum over many chunks of words is kept in fp32.
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        factor = ((targets != IGNORED) * gradient).unsqueeze(1)
        words = hidden.shape[1] if weight is None else weight.shape[0]
        for start, stop in _chunks(words, targets):
            dense: Any = None
            logits = _logits(hidden, weight, start, stop)
            if taught is not None:
                hints = _logits(taught, teaching, start, stop) / temperature
                dense = (logits / temperature).sub_(soft.unsqueeze(1)).exp_()
                dense.sub_(hints.sub_(known.unsqueeze(1)).exp_()).mul_(share * temperature)
                del hints
            if share < 1:
                # Without a weight the logits are the model's own output.
                own = logits if weight is not None else logits.clone()
                own.sub_(hard.unsqueeze(1)).exp_()
                here, column = _among(targets, start, stop)
                own.scatter_add_(1, column, -here.unsqueeze(1).float())
                dense = own if dense is None else dense.add_(own, alpha=1 - share)
                del own
            chunk = dense.mul_(factor).to(hidden.dtype)
            del logits, dense  # Freed before the products need memory.
            if of_weight is not None:
                torch.mm(chunk.t(), hidden, out=of_weight[start:stop])
            if of_hidden is not None and weight is None:
                of_hidden[:, start:stop] = chunk
            elif of_hidden is not None:
                of_hidden += chunk @ weight[start:stop]
            del chunk
        found = None if of_hidden is None else of_hidden.to(hidden.dtype)
        return found, of_weight, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor | None, start: int, stop: int) -> Tensor:
    """The logits of some words, (T, C), in fp32; may be a view."""
    if weight is None:
        return hidden[:, start:stop].float()
    return F.linear(hidden, weight[start:stop]).float()


def reject_foreign_words(tokens: Tensor, words: int, ignored: int | None = None) -> None:
    """Torch's RuntimeError for a token that is no word of a vocabulary, nor `ignored`; on a GPU a
    later call raises it. Batches name the sample where they are read (`data/batches.py`)."""
    are_words = (tokens >= 0) & (tokens < words)
    if ignored is not None:
        are_words |= tokens == ignored
    # To read the answer from a GPU would block the host in every microbatch.
    torch._assert_async(are_words.all(), f"a token is no word of a vocabulary of {words}")


def flat_targets(targets: Tensor) -> Tensor:
    """The targets (…) as (T,); uint8, which torch's own cross entropy takes too, becomes int64.

    In uint8 `IGNORED` would be the word 156, and the size of a vocabulary another number."""
    flat = targets.reshape(-1)
    return flat.long() if flat.dtype == torch.uint8 else flat


def most_logits(device: torch.device) -> int:
    return CHUNK_LOGITS if device.type == "cpu" else GPU_CHUNK_LOGITS


def _chunks(words: int, targets: Tensor) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each chunk of the vocabulary's `words` entries."""
    size = max(CHUNK_WORDS, most_logits(targets.device) // targets.numel())
    for start in range(0, words, size):
        yield start, min(start + size, words)


def _among(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Which tokens have a target in a chunk of words, (T,), and its column there, (T, 1)."""
    here = (targets >= start) & (targets < stop)
    return here, (targets - start).clamp(0, stop - start - 1).unsqueeze(1)
