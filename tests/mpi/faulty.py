"""A training that goes wrong on one rank: `python faulty.py GRID RUN_DIR RANK STEP FAULT`.

GRID is stages x replicas, such as 2x2. FAULT happens in a forward of the given rank in the
given step (the first is 1); "none" and any rank but the given one train on. What the tests
read besides the exit code goes to RUN_DIR: `moment`, the monotonic time of the fault, and
`cpu-<rank>.json`, what each rank used in the step of the fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from support.runs import mlp, summed_loss, tiny_config, vector_data
from torch import Tensor, nn

from axsparse.data.dataset import Datasets
from axsparse.data_parallel.agreement import Verdict
from axsparse.models.layer import Layer, Model
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.build import build

SLEEP_SECONDS = 3.0


class Fault:
    """What happens, once, when its step has come."""

    def __init__(self, job: Job, run_dir: Path, rank: int, step: int, kind: str) -> None:
        self.run_dir = run_dir
        self.step = step
        self._kind = kind if job.transport.rank == rank else "none"
        self._present = 1

    def finish_step(self, step: int) -> None:
        self._present = step + 1

    def happen(self) -> None:
        if self._present != self.step or self._kind == "none":
            return
        kind, self._kind = self._kind, "none"
        (self.run_dir / "moment").write_text(str(time.monotonic()))
        if kind == "raise":
            raise RuntimeError("a layer of glass\nbroke")
        if kind == "exit5":
            sys.exit(5)
        if kind == "exit0":
            sys.exit(0)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        assert kind == "sleep", kind
        time.sleep(SLEEP_SECONDS)


class Fragile(nn.Module):
    """A layer in whose forward the fault happens."""

    def __init__(self, inner: nn.Module, fault: Fault) -> None:
        super().__init__()
        self.inner = inner
        self._fault = fault

    def forward(self, inputs: Tensor) -> Tensor:
        self._fault.happen()
        outputs: Tensor = self.inner(inputs)
        return outputs


def fragile(model: Model, fault: Fault) -> Model:
    """The model with the fault in all of its layers, of which each rank has some."""

    def wrap(layer: Layer) -> Layer:
        return Layer(layer.name, lambda: Fragile(layer.build(), fault), layer.kind, layer.init)

    return Model([wrap(layer) for layer in model.layers], loss=summed_loss, name="faulty")


def main(job: Job) -> None:
    grid, run_dir, rank, step, kind = sys.argv[1:]
    g_inter, g_data = (int(number) for number in grid.split("x"))
    fault = Fault(job, Path(run_dir), int(rank), int(step), kind)
    config = tiny_config(run_dir=run_dir, train={"steps": 4})
    data = Datasets(vector_data())
    trainer = build(job, fragile(mlp(), fault), lambda: data, config, grid=Grid(g_inter, g_data))
    before: list[tuple[float, float]] = []

    def on_step(done: int, verdict: Verdict) -> None:
        fault.finish_step(done)
        used = os.times()
        before.append((used.user + used.system, used.elapsed))
        if done == fault.step:
            (cpu, wall), (cpu_then, wall_then) = before[-1], before[-2]
            shares = {"cpu": cpu - cpu_then, "wall": wall - wall_then}
            path = fault.run_dir / f"cpu-{job.transport.rank}.json"
            path.write_text(json.dumps(shares))

    trainer.train(on_step)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(main)
