"""A training in which a rank gets stuck: `python hanging.py RUN_DIR GRID FAULT RANK`.

GRID is stages x replicas, such as 2x2. FAULT happens on one rank, in step 3 unless it says
otherwise:

    stop        it is stopped (SIGSTOP) in a forward
    stop-save   it is stopped while it writes the checkpoint of step 2
    data        reading the batch never ends
    slow        the first forward of all takes longer than `watchdog.timeout`, every other some
                milliseconds more
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from support.runs import mlp, summed_loss, tiny_config, vector_data
from torch import Tensor, nn

from axsparse.config.load import LoadedConfig
from axsparse.data.batches import Batches
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.agreement import Verdict
from axsparse.models.layer import Layer, Model
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.build import build
from axsparse.training.checkpoint import saver as save

STEPS = 12
TIMEOUT = 2.0
LONG_SECONDS = 1.5 * TIMEOUT
SLOW_SECONDS = 0.02
STEP = 3


class Fault:
    """What happens, and when."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.present = 1
        self.has_begun = False

    def forward(self) -> None:
        if self.kind == "stop" and self.present == STEP:
            stop()
        if self.kind == "slow":
            time.sleep(SLOW_SECONDS if self.has_begun else LONG_SECONDS)
        self.has_begun = True


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def never_end() -> NoReturn:
    threading.Event().wait()
    raise AssertionError("nobody sets it")


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
    def __init__(self, inner: nn.Module, fault: Fault) -> None:
        super().__init__()
        self.inner = inner
        self._fault = fault

    def forward(self, inputs: Tensor) -> Tensor:
        self._fault.forward()
        outputs: Tensor = self.inner(inputs)
        return outputs


def fragile(model: Model, fault: Fault) -> Model:
    def wrap(layer: Layer) -> Layer:
        return Layer(layer.name, lambda: Fragile(layer.build(), fault), layer.kind, layer.init)

    return Model([wrap(layer) for layer in model.layers], loss=summed_loss, name="hanging")


def main(job: Job) -> None:
    run_dir, grid, kind, rank = sys.argv[1:]
    g_inter, g_data = (int(number) for number in grid.split("x"))
    fault = Fault(kind if job.transport.rank == int(rank) else "none")
    if fault.kind == "stop-save":
        stop_writing("step-2.tmp")
    if fault.kind == "data":
        stop_reading(STEP - 1)
    config = tiny_config(
        run_dir=run_dir,
        train={"steps": STEPS},
        checkpoint={"every": 2},
        watchdog={"timeout": TIMEOUT, "slow_steps": 4, "slow_ratio": 2.0},
    )

    def on_step(done: int, verdict: Verdict) -> None:
        fault.present = done + 1

    trainer = build(
        job,
        fragile(mlp(), fault),
        lambda: Datasets(vector_data()),
        LoadedConfig(config, "hanging", {}),
        grid=Grid(g_inter, g_data),
    )
    trainer.train(on_step)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(main)
