"""A training that goes wrong on one rank: `python failing.py GRID RUN_DIR RANK STEP FAULT`.

GRID is stages x replicas, such as 2x2. FAULT happens once on the given rank, in a forward of the
given step (the first is 1) unless it says otherwise; all other ranks train on:

    raise       an exception
    exit5       sys.exit(5)
    kill        kill -9
    sleep       it takes some seconds longer
    stop        it is stopped (SIGSTOP)
    stop-save   it is stopped while it writes the checkpoint of the step
    data        reading the batch never ends
    slow        the first forward of all takes longer than `watchdog.timeout`, every other some
                milliseconds more

Files for the tests, in addition to the exit code, go to RUN_DIR: `moment`, the monotonic time of
the fault, and `cpu-<rank>.json`, what each rank used in the step of the fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.runs import mlp, summed_loss, tiny_config, vector_data
from torch import Tensor, nn

from axsparse.data.batches import Batches
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.models.layer import Layer, Model
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.checkpoint import saver as save
from axsparse.training.trainer import build

SLEEP_SECONDS = 3.0
TIMEOUT = 2.0
LONG_SECONDS, SLOW_SECONDS = 1.5 * TIMEOUT, 0.02
WATCHED = ("stop", "stop-save", "data", "slow")
"""Faults that the watchdog notices; these runs have twelve steps and save every second one."""


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def break_down() -> None:
    raise RuntimeError("a layer of glass\nbroke")


FAULTS: dict[str, Callable[[], object]] = {
    "raise": break_down,
    "exit5": lambda: sys.exit(5),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(SLEEP_SECONDS),
    "stop": stop,
}
"""Faults in a forward."""


class Fault:
    """The fault of this rank, and its time."""

    def __init__(self, kind: str, step: int, run_dir: Path) -> None:
        self.kind = kind
        self.step = step
        self.run_dir = run_dir
        self.present = 1
        self.has_begun = False

    def forward(self) -> None:
        if self.kind == "slow":
            time.sleep(SLOW_SECONDS if self.has_begun else LONG_SECONDS)
        self.has_begun = True
        if self.present == self.step and self.kind in FAULTS:
            happen, self.kind = FAULTS[self.kind], "none"
            (self.run_dir / "moment").write_text(str(time.monotonic()))
            happen()


def never_end() -> None:
    threading.Event().wait()


def stop_writing(name: str) -> None:
    write: Callable[..., Any] = vars(save)["write_safetensors"]

    def stopping(path: Any, *arguments: Any, **options: Any) -> None:
        if path.parent.name == name:
            stop()
        write(path, *arguments, **options)

    vars(save)["write_safetensors"] = stopping


def stop_reading(step: int) -> None:
    read = Batches.training

    def reading(self: Batches, number: int) -> Any:
        if number == step:
            never_end()
        return read(self, number)

    type.__setattr__(Batches, "training", reading)


class Fragile(nn.Module):
    """A layer in whose forward the fault happens."""

    def __init__(self, inner: nn.Module, fault: Fault) -> None:
        super().__init__()
        self.inner = inner
        self._fault = fault

    def forward(self, inputs: Tensor) -> Tensor:
        self._fault.forward()
        outputs: Tensor = self.inner(inputs)
        return outputs


def fragile(model: Model, fault: Fault) -> Model:
    """The model with the fault in all of its layers, of which each rank has some."""

    def wrap(layer: Layer) -> Layer:
        return Layer(layer.name, lambda: Fragile(layer.build(), fault), layer.kind, layer.init)

    return Model([wrap(layer) for layer in model.layers], loss=summed_loss, name="failing")


def main(job: Job) -> None:
    grid, run_dir, rank, step, kind = sys.argv[1:]
    g_inter, g_data = (int(number) for number in grid.split("x"))
    own = kind if job.transport.rank == int(rank) else "none"
    fault = Fault(own, int(step), Path(run_dir))
    if own == "stop-save":
        stop_writing(f"step-{step}.tmp")
    if own == "data":
        stop_reading(int(step) - 1)
    watched: dict[str, Any] = {
        "checkpoint": {"every": 2},
        "watchdog": {"timeout": TIMEOUT, "slow_steps": 4, "slow_ratio": 2.0},
    }
    is_watched = kind in WATCHED
    config = tiny_config(
        run_dir=run_dir,
        train={"steps": 12 if is_watched else 4},
        **(watched if is_watched else {}),
    )
    before: list[tuple[float, float]] = []

    def on_step(done: int, verdict: StepResult) -> None:
        fault.present = done + 1
        used = os.times()
        before.append((used.user + used.system, used.elapsed))
        if done == fault.step > 1:
            (cpu, wall), (cpu_then, wall_then) = before[-1], before[-2]
            shares = {"cpu": cpu - cpu_then, "wall": wall - wall_then}
            path = fault.run_dir / f"cpu-{job.transport.rank}.json"
            path.write_text(json.dumps(shares))

    trainer = build(
        job,
        fragile(mlp(), fault),
        lambda: Datasets(vector_data()),
        config.with_origins("failing", {}),
        grid=Grid(g_inter, g_data),
    )
    trainer.train(on_step)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(main)
