"""Every step's and evaluation's figures, from all ranks into metrics.jsonl and onto the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from axsparse.observe.gpu_phases import LateSeconds
from axsparse.observe.metrics import (
    BackRecord,
    EvalRecord,
    MaskRecord,
    MetricsFile,
    PlanRecord,
    StepRecord,
    perplexity,
)
from axsparse.observe.step_gather import StepGather, StepTotals
from axsparse.observe.step_lines import eval_line, step_line
from axsparse.observe.watchdog.slow_ranks import SlowRanks
from axsparse.runtime.communication import Backoff, Collective
from axsparse.runtime.console import Console, Unit, format_bytes

COMPARED_STEPS = 5
"""After so many steps what was predicted is held against what was measured."""


@dataclass(frozen=True)
class StepFigures:
    """What all ranks know alike of a step."""

    step: int
    """Steps done, this one included."""
    loss: float
    learning_rate: float
    grad_norm: float
    loss_scale: float
    skipped: str | None = None
    """Why no rank updated its weights; None if all did."""
    skipped_steps: int = 0
    """So far in this run."""


@dataclass(frozen=True)
class StepForecast:
    """Of a step, by the planner."""

    memory_bytes: float
    """Peak of the fullest rank."""
    step_seconds: float | None
    """None where nobody knows the machine."""


@dataclass(frozen=True)
class RunFigures:
    """What does not change from step to step."""

    steps: int
    log_every: int
    tokens_per_step: int
    flops_per_step: float
    peak_flops: float
    """Of all ranks together."""
    unit: Unit
    """What a target is: a token, or a sample that is none."""
    predicted: StepForecast | None = None
    """What the plan says of memory and time."""


class Recorder:
    """All ranks push their figures; rank 0 writes them down one step later."""

    def __init__(
        self,
        world: Collective,
        backoff: Backoff,
        run: RunFigures,
        file: MetricsFile | None,
        console: Console | None,
        slow: SlowRanks | None = None,
    ) -> None:
        """`file` and `console` are given on rank 0, or nowhere; `slow` warns there of ranks that
        hold others up."""
        self._gather = StepGather(world, backoff, each=["compute"])
        self._run = run
        self._file = file
        self._console = console
        self._slow = slow
        self._late: tuple[int, LateSeconds, Mapping[str, int]] | None = None
        self._known: dict[int, StepFigures] = {}
        self._began = time.perf_counter()
        self._seconds: list[float] = []
        self._first: int | None = None

    @property
    def predicted_memory_bytes(self) -> float | None:
        """Peak of the fullest rank by the plan; None without one."""
        predicted = self._run.predicted
        return None if predicted is None else predicted.memory_bytes

    def step(
        self, figures: StepFigures, seconds: Mapping[str, float], most: Mapping[str, int]
    ) -> None:
        """Push one step: `seconds` from `Phases.end_step`, `most` whose maximum is recorded.

        What a GPU has measured is pushed with the next step, on all ranks alike: its marks lie
        before that step's agreement, so that nobody waits for them.
        """
        self._known[figures.step] = figures
        if self._first is None:
            self._first = figures.step
        self._push_late()
        if isinstance(seconds, LateSeconds):
            self._late = figures.step, seconds, most
        else:
            self._write(self._gather.push(figures.step, seconds, most))

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Record an evaluation after `step` steps: loss, perplexity of tokens, and the fractions
        that the model's metrics found."""
        self.flush()
        if self._run.unit == "tokens":
            metrics = {"perplexity": perplexity(loss), **metrics}
        if self._file is not None:
            self._file.write(EvalRecord(step, loss, metrics))
        self.say(eval_line(step, self._run.steps, loss, metrics))

    def masks(self, record: MaskRecord) -> None:
        """Record a look at the masks or a change of them; `record` is the same on all ranks."""
        self.flush()
        if self._file is not None:
            self._file.write(record)
        parts = [f"step {record.step}/{self._run.steps}", record.masks]
        if "sparsity" in record.metrics:
            parts.append(f"sparsity {100 * record.metrics['sparsity']:.4g} %")
        before, after = record.model_state_bytes_before, record.model_state_bytes
        if before != after:
            parts.append(f"model state/rank {format_bytes(before)} → {format_bytes(after)}")
        self.say("  ".join(parts))

    def went_back(self, record: BackRecord) -> None:
        """Record where a spike of the loss has led."""
        if self._file is not None:
            self._file.write(record)

    def flush(self) -> None:
        """Write down what is still on its way; waits for the GPU to end the last step."""
        self._push_late()
        self._write(self._gather.flush())

    def say(self, text: str) -> None:
        """A line on rank 0's screen."""
        if self._console is not None:
            self._console.line(text)

    def close(self) -> None:
        """Close the screen and the file."""
        if self._console is not None:
            self._console.close()
        if self._file is not None:
            self._file.close()

    def _push_late(self) -> None:
        if self._late is not None:
            (step, seconds, most), self._late = self._late, None
            self._write(self._gather.push(step, seconds, most))

    def _write(self, gathered: StepTotals | None) -> None:
        if gathered is None:
            return
        figures = self._known.pop(gathered.step)
        if self._file is None and self._console is None:
            return
        run = self._run
        seconds = gathered.times["step"]
        flops = run.flops_per_step / seconds
        record = StepRecord(
            step=figures.step,
            loss=figures.loss,
            learning_rate=figures.learning_rate,
            grad_norm=figures.grad_norm,
            loss_scale=figures.loss_scale,
            skipped=figures.skipped is not None,
            skip_reason=figures.skipped,
            skipped_steps=figures.skipped_steps,
            tokens=run.tokens_per_step,
            step_seconds=seconds,
            data_seconds=gathered.times["data"],
            compute_seconds=gathered.times["compute"],
            compress_seconds=gathered.times["compress"],
            optimizer_seconds=gathered.times["optimizer"],
            p2p_seconds=gathered.times["p2p"],
            bubble_seconds=gathered.times["bubble"],
            collective_seconds=gathered.times["collective"],
            other_seconds=gathered.times["other"],
            tokens_per_second=run.tokens_per_step / seconds,
            model_flops_per_second=flops,
            mfu=flops / run.peak_flops,
            model_state_bytes=gathered.maxima["model_state_bytes"],
            gradient_bytes_sent=gathered.maxima["gradient_bytes_sent"],
            p2p_bytes_sent=gathered.maxima["p2p_bytes_sent"],
            peak_memory_bytes=gathered.maxima["peak_memory_bytes"],
        )
        if self._file is not None:
            self._file.write(record)
        if self._console is not None:
            self._show(self._console, record)
        if self._slow is not None:
            warning = self._slow.add(gathered.step, gathered.each["compute"])
            if warning is not None:
                self.say(warning)
        if run.predicted is not None and len(self._seconds) < COMPARED_STEPS:
            self._seconds.append(seconds)
            if len(self._seconds) == COMPARED_STEPS:
                self._compare(run.predicted, record)

    def _compare(self, predicted: StepForecast, record: StepRecord) -> None:
        """Say how far the plan was off; a first step that allocates is none to go by."""
        own = PlanRecord(
            step=record.step,
            predicted_peak_memory_bytes=predicted.memory_bytes,
            measured_peak_memory_bytes=record.peak_memory_bytes,
            predicted_step_seconds=predicted.step_seconds,
            measured_step_seconds=median(self._seconds[1:]),
        )
        if self._file is not None:
            self._file.write(own)
        text = (
            f"peak memory {format_bytes(own.measured_peak_memory_bytes)}, predicted "
            f"{format_bytes(own.predicted_peak_memory_bytes)}"
        )
        if own.predicted_step_seconds is not None:
            text += (
                f"; {own.measured_step_seconds:.3g} s a step, predicted "
                f"{own.predicted_step_seconds:.3g}"
            )
        self.say(f"step {record.step}/{self._run.steps}  {text}")

    def _show(self, console: Console, record: StepRecord) -> None:
        run = self._run
        assert self._first is not None, "a step has been pushed"
        each = (time.perf_counter() - self._began) / (record.step - self._first + 1)
        line = step_line(record, run.steps, each * (run.steps - record.step), run.unit)
        console.progress(record.step, run.steps, line.partition("  ")[2])
        if record.step % run.log_every == 0 or record.step in (1, run.steps):
            console.line(line)
        if record.skipped:
            console.line(f"step {record.step}: {record.skip_reason}; no rank updated its weights")
