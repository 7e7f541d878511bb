"""Records the figures of all ranks: rank 0 writes metrics.jsonl and prints lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from axsparse.observe.metrics import (
    EvalRecord,
    MaskRecord,
    MetricsFile,
    PlanRecord,
    StepRecord,
    perplexity,
)
from axsparse.observe.phases import LateSeconds
from axsparse.observe.watchdog.slow_ranks import SlowRanks
from axsparse.runtime.communication import Backoff, Collective, Op, Work, wait
from axsparse.runtime.console import Console, Unit, format_bytes, format_count, format_seconds
from axsparse.runtime.process import write_line

DRAWN_SECONDS = 0.1
COMPARED_STEPS = 5
"""How many steps are measured before predictions are compared with them."""


@dataclass(frozen=True)
class StepFigures:
    """The figures of a step that are the same on all ranks."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    loss_scale: float
    skip_reason: str | None = None
    skipped_steps: int = 0
    """Skipped steps so far in this run."""
    weights_digest: int | None = None
    """A hash of all weights before the step's update, in some steps."""


@dataclass(frozen=True)
class RunFigures:
    """The figures of a run that do not change from step to step."""

    steps: int
    log_every: int
    tokens_per_step: int
    flops_per_step: float
    peak_flops: float
    unit: Unit
    predicted_memory_bytes: float | None = None
    """The planner's prediction of the peak memory of the fullest rank; None without one."""
    predicted_step_seconds: float | None = None


def step_line(record: StepRecord, steps: int, eta: float | None, unit: Unit) -> str:
    """One of the run's `steps` on one line. `eta` is in seconds; None at the first step, which also
    compiles and allocates, so that it says nothing about the others."""
    later = "eta after the next steps: the first one also compiles"
    line = (
        f"step {record.step}/{steps}  loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  "
        f"bubble {100 * (record.bubble_seconds / record.step_seconds):.0f} %  "
        f"{format_count(record.tokens_per_second)} {unit}/s  "
        f"{later if eta is None else f'eta {format_seconds(eta)}'}"
    )
    return f"{line}  skipped {record.skipped_steps}" if record.skipped_steps else line


@dataclass(eq=False)
class Recorder:
    """Takes the figures of all ranks; rank 0 writes and shows them one step later.

    All ranks record the same steps with the same names. One all-reduce of an fp64 buffer combines a
    step while the next one runs, so that no rank waits. The buffer begins with the times, whose sum
    gives the mean. Then each rank has slots, for its maxima and for the seconds in which it
    computed. All other ranks have zeros there, so the sum is the owner's value, exact for integers
    up to 2**53.
    """

    world: Collective
    backoff: Backoff
    run: RunFigures
    file: MetricsFile | None
    """None on ranks other than 0, as `console` and `slow`."""
    console: Console | None
    slow: SlowRanks | None = None
    _late: tuple[StepFigures, LateSeconds, Mapping[str, int]] | None = None
    _pending: tuple[StepFigures, Sequence[str], Sequence[str], Tensor, Work] | None = None
    """A step whose sums over ranks are under way: its figures, the names of its times and maxima,
    the buffer of the sums and the operation."""
    _since: float = 0.0
    """When the first step was shown, which also compiles and counts in no rate."""
    _compared_seconds: list[float] = field(default_factory=list)
    _first: int | None = None
    _drawn_at: float = -DRAWN_SECONDS

    def step(
        self, figures: StepFigures, seconds: Mapping[str, float], maxima: Mapping[str, int]
    ) -> None:
        """Record a step: `seconds` from `Phases.end_step`, and the largest `maxima` of all ranks.

        The times of a GPU are combined with the next step, on all ranks alike. By then the GPU
        has passed its marks, so that no rank waits for them.
        """
        if self._first is None:
            self._first = figures.step
        self._start_late()
        if isinstance(seconds, LateSeconds):
            self._late = figures, seconds, maxima
        else:
            self._start(figures, seconds, maxima)

    def evaluation(
        self, step: int, loss: float, metrics: Mapping[str, float], part: str = ""
    ) -> None:
        """Record an evaluation after `step` steps; `metrics` are fractions of targets. `part` says
        how much of the validation data it was made on, if that was not all."""
        self.flush()
        shown = "".join(f"  {name} {100 * value:.2f} %" for name, value in metrics.items())
        if self.run.unit == "tokens":
            metrics = {"perplexity": perplexity(loss), **metrics}
            shown = f"  perplexity {metrics['perplexity']:.3f}{shown}"
        if self.file is not None:
            self.file.write(EvalRecord(step, loss, metrics))
        shown += f"  ({part})" if part else ""
        self.say(f"step {step}/{self.run.steps}  validation loss {loss:.4f}{shown}")

    def masks(self, record: MaskRecord) -> None:
        """Record a change of the masks, or a look at them; `record` is the same on all ranks."""
        self.flush()
        if self.file is not None:
            self.file.write(record)
        parts = [f"step {record.step}/{self.run.steps}", record.masks]
        if "sparsity" in record.metrics:
            parts.append(f"sparsity {100 * record.metrics['sparsity']:.4g} %")
        if "loss_after" in record.metrics:
            was, now = record.metrics["loss_before"], record.metrics["loss_after"]
            parts.append(f"validation loss {was:.4f} → {now:.4f}")
        before, after = record.model_state_bytes_before, record.model_state_bytes
        if before != after:
            parts.append(f"model state/rank {format_bytes(before)} → {format_bytes(after)}")
        self.say("  ".join(parts))

    def flush(self) -> None:
        """Write the steps that are not written yet; waits for the GPU to end the last one."""
        self._start_late()
        self._finish()

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.line(text)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.console is not None:
            self.console.close()
            if self.console.lost:
                write_line(
                    f"warning: stdout: lines could not be written ({self.console.lost}); "
                    "metrics.jsonl of the run has all figures"
                )

    def _start_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            self._start(*late)

    def _start(
        self, figures: StepFigures, seconds: Mapping[str, float], maxima: Mapping[str, int]
    ) -> None:
        """Finish the step before, and start to combine this one, without waiting for it."""
        self._finish()
        assert all(0 <= value <= 2**53 for value in maxima.values()), f"no exact float: {maxima}"
        slots = torch.tensor([*maxima.values(), seconds["compute"]], dtype=torch.float64)
        times = torch.tensor([*seconds.values()], dtype=torch.float64)
        buffer = torch.zeros(len(times) + self.world.size * len(slots), dtype=torch.float64)
        buffer[: len(times)] = times
        buffer[len(times) :].view(self.world.size, -1)[self.world.rank] = slots
        work = self.world.start(Op.ALL_REDUCE, buffer)
        self._pending = figures, tuple(seconds), tuple(maxima), buffer, work

    def _finish(self) -> None:
        """Wait for the step that was started last, if there is one; rank 0 writes and shows it."""
        if self._pending is None:
            return
        (figures, time_names, maxima_names, buffer, work), self._pending = self._pending, None
        wait(work, self.backoff)
        if self.file is None and self.console is None:
            return
        run, size = self.run, self.world.size
        means = (buffer[: len(time_names)] / size).tolist()
        seconds: dict[str, Any] = dict(zip(time_names, means, strict=True))
        slots = buffer[len(time_names) :].view(size, -1)
        largest: Iterable[Any] = map(int, slots[:, :-1].amax(dim=0).tolist())
        flops = run.flops_per_step / seconds["step"]
        record = StepRecord(
            **asdict(figures),
            time=time.time(),
            skipped=figures.skip_reason is not None,
            tokens=run.tokens_per_step,
            tokens_per_second=run.tokens_per_step / seconds["step"],
            model_flops_per_second=flops,
            mfu=flops / run.peak_flops,
            **{f"{name}_seconds": mean for name, mean in seconds.items()},
            **dict(zip(maxima_names, largest, strict=True)),
        )
        if self.file is not None:
            self.file.write(record)
        if self.console is not None:
            self._show(self.console, record)
        computed = slots[:, -1].tolist()
        if self.slow is not None and (warning := self.slow.add(record.step, computed)):
            self.say(warning)
        predicted = run.predicted_memory_bytes
        if predicted is not None and len(self._compared_seconds) < COMPARED_STEPS:
            self._compared_seconds.append(record.step_seconds)
            if len(self._compared_seconds) == COMPARED_STEPS:
                self._compare(predicted, record)

    def _compare(self, predicted_bytes: float, record: StepRecord) -> None:
        """Record and say how far the prediction was off; the first step does not count."""
        predicted = self.run.predicted_step_seconds
        measured = median(self._compared_seconds[1:])
        peak = record.peak_memory_bytes
        if self.file is not None:
            self.file.write(PlanRecord(record.step, predicted_bytes, peak, predicted, measured))
        text = f"peak memory {format_bytes(peak)}, predicted {format_bytes(predicted_bytes)}"
        if predicted is not None:
            text += f"; {measured:.3g} s a step, predicted {predicted:.3g}"
        self.say(f"step {record.step}/{self.run.steps}  {text}")

    def _show(self, console: Console, record: StepRecord) -> None:
        run = self.run
        assert self._first is not None, "a step has been pushed"
        done, eta, left = record.step - self._first, None, "compiling"
        if done == 0:
            self._since = time.perf_counter()
        else:
            eta = (time.perf_counter() - self._since) / done * (run.steps - record.step)
            left = f"eta {format_seconds(eta)}"
        if time.monotonic() - self._drawn_at >= DRAWN_SECONDS or record.step == run.steps:
            rate = f"{format_count(record.tokens_per_second)} {run.unit}/s"
            text = f"{left}  {rate}  loss {record.loss:.3f}"
            console.progress(record.step, run.steps, text)
            self._drawn_at = time.monotonic()
        if record.step % run.log_every == 0 or record.step in (1, run.steps):
            console.line(step_line(record, run.steps, eta, run.unit))
        if record.skipped:
            console.line(f"step {record.step}: {record.skip_reason}; no rank updated its weights")
