"""The lines that rank 0 prints for a step and for an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from axsparse.runtime.console import (
    Unit,
    format_rate,
    format_seconds,
)


def step_line(
    step: int,
    steps: int,
    loss: float,
    grad_norm: float,
    bubble: float,
    rate: float,
    eta: float,
    unit: Unit,
    skipped: int = 0,
) -> str:
    """One step on one line; `bubble` is a fraction of the step, `rate` is a second's units,
    `eta` is in seconds, `skipped` counts steps."""
    line = (
        f"step {step}/{steps}  loss {loss:.3f}  grad norm {grad_norm:.2f}  "
        f"bubble {100 * bubble:.0f} %  {format_rate(rate, unit)}  eta {format_seconds(eta)}"
    )
    return f"{line}  skipped {skipped}" if skipped else line


def eval_line(step: int, steps: int, loss: float, metrics: Mapping[str, float]) -> str:
    """One evaluation on one line; every metric but perplexity is a fraction of the targets."""
    found = "".join(
        f"  {name} {value:.3f}" if name == "perplexity" else f"  {name} {100 * value:.2f} %"
        for name, value in metrics.items()
    )
    return f"step {step}/{steps}  validation loss {loss:.4f}{found}"
