"""The records in metrics.jsonl, one a line, and copies for TensorBoard and Weights & Biases.

The copies never end or hold up a run: each sink has a separate thread on rank 0, and an error in
it, or one that falls behind, becomes one warning.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axsparse.config.schema import Config
from axsparse.runtime.errors import ConfigError, one_line, writing
from axsparse.runtime.files.run_folder import identifier_in, replaced
from axsparse.runtime.process import write_line


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
    skip_reason: str | None
    """The tensor that was not finite, and its place; None if not skipped."""
    skipped_steps: int
    """Skipped steps so far in this run."""
    tokens: int
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
    step: int
    """Optimizer steps done before it."""
    eval_loss: float
    metrics: Mapping[str, float]
    """Each metric is a separate key in the file: for tokens `perplexity`, which is
    `perplexity(eval_loss)`, and for each metric of the model the fraction of targets it counts."""


@dataclass(frozen=True)
class MaskRecord:
    """One change of the masks between two steps, or one look at them."""

    step: int
    """Optimizer steps done before it."""
    masks: str
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


WAITING = 1000
"""Records that a sink may be behind; further ones are left out."""
CLOSE_SECONDS = 20.0
MOST_SAID = 220
"""The most letters of a warning about an error of a sink's library."""
WANDB_ID = "wandb-id"
"""The file in the run directory that has the run's id at Weights & Biases, for resumptions."""
GROUPS: Mapping[type[object], str] = {
    StepRecord: "train",
    EvalRecord: "validation",
    MaskRecord: "masks",
    PlanRecord: "plan",
}
"""By kind of record, how the names of its curves begin."""


Write = Callable[[int, Mapping[str, float]], None]
"""Takes the step and the numbers of one record, by the names of their curves."""


def curves_of(record: Record) -> dict[str, float]:
    """The finite numbers of a record by the names of their curves, such as "train/loss"."""
    return {
        f"{GROUPS[type(record)]}/{name}": float(value)
        for name, value in values(record).items()
        if isinstance(value, (int, float)) and name != "step" and math.isfinite(value)
    }


class SinkThread:
    """A sink in a separate thread, behind a queue."""

    def __init__(self, key: str, open_sink: Callable[[int], AbstractContextManager[Write]]) -> None:
        """`key` is the setting that asks for it; it opens at its first record's step."""
        self._key = key
        self._open = open_sink
        self._queue: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"axsparse {key}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._warn(f"is {WAITING} records behind")

    def close(self) -> None:
        """Wait a while until all that was handed over is written."""
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # this was reported when records were left out
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"has not finished within {CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        try:
            record = self._queue.get()
            if record is None:
                return
            with self._open(record.step) as write:
                while record is not None:
                    write(record.step, curves_of(record))
                    record = self._queue.get()
        except BaseException as error:  # also SystemExit of a library
            self._warn(one_line(error)[:MOST_SAID])
            while self._queue.get() is not None:  # so that the queue never fills
                pass

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            write_line(f"warning: {self._key}: {what}; the run goes on without it")


class MetricsFile:
    """Appends records to metrics.jsonl, and hands them to sinks as well."""

    def __init__(self, path: Path, sinks: Sequence[SinkThread] = ()) -> None:
        """Open or create the file; OutputError if its folder is missing or not writable."""
        self._path = path
        self._place = path.absolute()  # a program may change its working directory
        self._run = identifier_in(self._place.parent)
        self._sinks = sinks
        self._has_written = False
        with self._writing():
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line of strict JSON, with null for numbers that are not finite, and flush it.

        A file that was moved, removed or emptied meanwhile is opened anew, with a warning. Raises
        OutputError if that fails, or if the directory is not the run's any more.
        """
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values(record).items()
        }
        line = json.dumps(finite, allow_nan=False)
        with self._writing():
            if not self._is_in_place():
                there = identifier_in(self._place.parent)
                if there is None or there != self._run:
                    raise replaced(self._path.parent)
                self._file.close()
                self._file = self._place.open("a", encoding="utf-8")
                if self._has_written:  # else the run has begun with an empty file
                    write_line(
                        f"warning: {self._path}: was moved, removed or emptied while the run "
                        "trained; it contains only the records from now on"
                    )
            self._file.write(line + "\n")
            self._file.flush()
            self._has_written = True
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close the file and the sinks; OutputError if the rest of a failed `write` fails again."""
        with self._writing():
            self._file.close()
        for sink in self._sinks:
            sink.close()

    def _is_in_place(self) -> bool:
        with suppress(FileNotFoundError):
            there = self._place.stat()
            is_same = os.path.samestat(os.fstat(self._file.fileno()), there)
            return is_same and there.st_size >= self._file.tell()
        return False

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"{self._path}:", "free space there or choose another run_dir")


@contextmanager
def tensorboard(folder: Path, first_step: int) -> Iterator[Write]:
    """Write event files; after a resume, later records replace the earlier ones of the same
    steps."""
    module: Any = importlib.import_module("torch.utils.tensorboard")
    writer = module.SummaryWriter(str(folder), purge_step=first_step)

    def write(step: int, curves: Mapping[str, float]) -> None:
        for name, value in curves.items():
            writer.add_scalar(name, value, step)

    yield write
    writer.close()


@contextmanager
def wandb(project: str, run_dir: Path, config: Config) -> Iterator[Write]:
    """Log to a project at Weights & Biases; WANDB_MODE and WANDB_API_KEY count as ever."""
    path = run_dir / WANDB_ID
    if not path.exists():
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    run = importlib.import_module("wandb").init(
        project=project,
        name=run_dir.name,
        id=path.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(run_dir),
        config=config.model_dump(mode="json"),
    )
    # A run that went back logs earlier steps again, which W&B's own counter does not allow.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    yield lambda step, curves: run.log({"step": step, **curves})
    run.finish()


def reject_missing_packages(config: Config) -> None:
    """ConfigError for a sink whose package is not installed."""
    chosen = config.logging
    for key, is_wanted in (("tensorboard", chosen.tensorboard), ("wandb", chosen.wandb)):
        if is_wanted and find_spec(key) is None:
            raise ConfigError(
                f"{config.where(f'logging.{key}')}: {is_wanted}, but the package {key} is not "
                f"installed; pip install 'axsparse[{key}]', or leave it out"
            )


def open_records(config: Config, run_dir: Path, path: Path) -> MetricsFile:
    """The writers of a run's records; OutputError if metrics.jsonl cannot be opened."""
    chosen, sinks = config.logging, []
    if chosen.tensorboard:
        folder = run_dir / "tensorboard"
        sinks.append(SinkThread("logging.tensorboard", lambda step: tensorboard(folder, step)))
    if chosen.wandb is not None:
        project = chosen.wandb
        sinks.append(SinkThread("logging.wandb", lambda _: wandb(project, run_dir, config)))
    return MetricsFile(path, sinks)
