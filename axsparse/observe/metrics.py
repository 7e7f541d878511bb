"""The records in metrics.jsonl, one a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Bytes are maxima over ranks, times means over ranks.

    The `*_seconds` between `step_seconds` and `tokens_per_second` are the phases of
    `observe.phases`; they add up to `step_seconds`.
    """

    step: int
    """Optimizer steps done, this one included."""
    time: float
    """When it was recorded, in seconds since the beginning of 1970, UTC."""
    loss: float
    """Mean loss of the step's targets, before the update."""
    learning_rate: float
    grad_norm: float
    """Global norm of the gradient over kept entries, before clipping."""
    weights_digest: int | None
    """A hash of all weights before the update, the same in every layout; None in steps that do not
    compare replicas."""
    loss_scale: float
    skipped: bool
    """Whether the weights were left as they were."""
    skip_reason: str | None
    """The tensor that was not finite, and its place, or by how much the loss jumped; None if not
    skipped."""
    skipped_steps: int
    """Skipped steps so far in this run."""
    tokens: int
    """Tokens in this step over all replicas; samples if the data has no tokens."""
    step_seconds: float
    data_seconds: float
    compute_seconds: float
    compress_seconds: float
    optimizer_seconds: float
    p2p_seconds: float
    bubble_seconds: float
    collective_seconds: float
    other_seconds: float
    tokens_per_second: float
    model_flops_per_second: float
    """Summed over all ranks; recomputation is not counted."""
    mfu: float
    """`model_flops_per_second` as a fraction of the peak of all ranks."""
    model_state_bytes: int
    gradient_bytes_sent: int
    p2p_bytes_sent: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation."""

    step: int
    """Optimizer steps done before it."""
    eval_loss: float
    """Mean loss of the validation targets."""
    metrics: Mapping[str, float]
    """Each metric is a separate key in the file: for tokens `perplexity`, which is
    `perplexity(eval_loss)`, and for each metric of the model the fraction of targets it counts."""


@dataclass(frozen=True)
class MaskRecord:
    """One change of the masks between two steps, or one look at them."""

    step: int
    """Optimizer steps done before it."""
    masks: str
    """The change of the masks, in words."""
    metrics: Mapping[str, float]
    """Each figure is a separate key in the file, such as `sparsity` (of all pruned tensors) and an
    Early-Bird search's `churn`."""
    model_state_bytes: int
    """Bytes of model state after the change, the maximum over ranks."""
    model_state_bytes_before: int


@dataclass(frozen=True)
class PlanRecord:
    """The planner's prediction, and the measurement of the first steps."""

    step: int
    """Optimizer steps done before it."""
    predicted_peak_memory_bytes: float
    """Peak memory of the fullest rank."""
    measured_peak_memory_bytes: int
    predicted_step_seconds: float | None
    """None without `layout.cluster`."""
    measured_step_seconds: float
    """Median of the first steps, without the very first."""


Record = StepRecord | EvalRecord | MaskRecord | PlanRecord


def values(record: Record) -> dict[str, float | bool | str | None]:
    """The fields of a record as the file has them, by name."""
    fields = asdict(record)
    fields |= fields.pop("metrics", {})
    return fields


def perplexity(eval_loss: float) -> float:
    """exp(eval_loss), or infinity if that is too large for a float."""
    try:
        return math.exp(eval_loss)
    except OverflowError:
        return math.inf
