"""The sinks of a run's records: metrics.jsonl, and copies for TensorBoard and Weights & Biases.

metrics.jsonl has every record. The copies never end or hold up a run: each sink has a separate
thread on rank 0, and an error in it, or one that falls behind, becomes one warning.
"""

from __future__ import annotations

import importlib
import json
import math
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axsparse.config.schema import Config
from axsparse.observe.metrics import EvalRecord, MaskRecord, Record, StepRecord, values
from axsparse.runtime.errors import ConfigError, writing
from axsparse.runtime.launcher import write_line

WAITING = 1000
"""Records that a sink may be behind; further ones are left out."""
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for a sink."""
WANDB_ID = "wandb-id"
"""The file in the run directory that has the run's id at Weights & Biases, for resumptions."""
GROUPS: Mapping[type[object], str] = {
    StepRecord: "train",
    EvalRecord: "validation",
    MaskRecord: "masks",
}
"""By kind of record, how the names of its curves begin; a record of no such kind is of the plan."""


Write = Callable[[int, Mapping[str, float]], None]
"""Takes the step and the numbers of one record, by the names of their curves."""
OpenSink = Callable[[int], AbstractContextManager[Write]]
"""Opens a sink at its first record's step; at the end it flushes."""


def curves_of(record: Record) -> dict[str, float]:
    """The finite numbers of a record by the names of their curves, such as "train/loss"."""
    group = GROUPS.get(type(record), "plan")
    return {
        f"{group}/{name}": float(value)
        for name, value in values(record).items()
        if isinstance(value, (int, float)) and name != "step" and math.isfinite(value)
    }


class SinkThread:
    """A sink in a separate thread, behind a queue."""

    def __init__(self, key: str, open_sink: OpenSink) -> None:
        """`key` is the setting that asks for it."""
        self._key = key
        self._open = open_sink
        self._queue: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"axsparse {key}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand a record over, without waiting."""
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
            text = " ".join(str(error).split()) or "no message"
            self._warn(f"{type(error).__name__}: {text[:200]}")
            while self._queue.get() is not None:  # so that the queue never fills
                pass

    def _warn(self, what: str) -> None:
        """Write one warning, the first one."""
        if not self._warned:
            self._warned = True
            write_line(f"warning: {self._key}: {what}; the run goes on without it")


class MetricsFile:
    """Appends records to metrics.jsonl, and hands them to sinks as well."""

    def __init__(self, path: Path, sinks: Sequence[SinkThread] = ()) -> None:
        """Open or create the file; OutputError if its folder is missing or not writable."""
        self._path = path
        self._sinks = sinks
        with self._writing():
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line of strict JSON, with null for numbers that are not finite, and flush it.

        Raises OutputError if that fails.
        """
        finite = {name: _finite(value) for name, value in values(record).items()}
        line = json.dumps(finite, allow_nan=False)
        with self._writing():
            self._file.write(line + "\n")
            self._file.flush()
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close the file and the sinks; OutputError if the rest of a failed `write` fails again."""
        with self._writing():
            self._file.close()
        for sink in self._sinks:
            sink.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"{self._path}:", "free space there or choose another run_dir")


def _finite(value: float | bool | str | None) -> float | bool | str | None:
    """The value, or None for NaN and infinities, which strict JSON cannot express."""
    if value is None or isinstance(value, str) or math.isfinite(value):
        return value
    return None


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
