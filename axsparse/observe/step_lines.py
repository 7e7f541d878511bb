"""The lines that rank 0 prints for a step and for an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from axsparse.observe.metrics import StepRecord
from axsparse.runtime.console import Unit, format_rate, format_seconds


def step_line(record: StepRecord, steps: int, eta: float, unit: Unit) -> str:
    """One of the run's `steps` on one line; `eta` is the time to the end of the run in seconds."""
    line = (
        f"step {record.step}/{steps}  loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  "
        f"bubble {100 * (record.bubble_seconds / record.step_seconds):.0f} %  "
        f"{format_rate(record.tokens_per_second, unit)}  eta {format_seconds(eta)}"
    )
    return f"{line}  skipped {record.skipped_steps}" if record.skipped_steps else line


def eval_line(
    step: int, steps: int, loss: float, metrics: Mapping[str, float], part: str = ""
) -> str:
    """One evaluation on one line; every metric but perplexity is a fraction of the targets.

    `part` says how much of the validation data it was made on, if that was not all.
    """
    found = "".join(
        f"  {name} {value:.3f}" if name == "perplexity" else f"  {name} {100 * value:.2f} %"
        for name, value in metrics.items()
    )
    return f"step {step}/{steps}  validation loss {loss:.4f}{found}{part and f'  ({part})'}"
