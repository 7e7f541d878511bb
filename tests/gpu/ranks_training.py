"""The program of tests under mpirun: trains one case after another, and saves each rank's results;
and its launcher.

    mpirun -n 4 python tests/gpu/ranks_training.py FOLDER CASES.json

Where it trains follows from what this process may see: a GPU, or the CPU if that is none.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from support.mpirun import TESTS, Finished, run_alone, run_mpirun
from support.oracle import Trace
from support.runs import tiny_config, tiny_gpt, token_data, train_here
from torch import Tensor

from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training.trainer import Trainer


@dataclass
class Case:
    """One training, as JSON."""

    name: str
    layout: tuple[int, ...]
    """Stages, replicas and, if there are several, tensor-parallel ranks."""
    settings: dict[str, Any]
    """Sections, as of `tiny_config`."""
    overflow_at: int | None = None
    """The step, from 0, in which an entry of one gradient on the last rank is infinite."""
    run_dir: Path | str | None = None
    """Where it saves; None: nowhere."""
    resume: Path | str | None = None


@dataclass
class Outcome:
    """The results of one rank, tensors on the host."""

    trace: Trace
    scale: float
    validation_loss: float | None
    devices: set[str]
    """Types of the devices that model state is on."""


def train(job: Job, case: Case) -> Outcome:
    # The first sets what NVIDIA's containers override by a variable.
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    config = tiny_config(**case.settings)
    if case.run_dir is not None:
        config = config.model_copy(update={"run_dir": case.run_dir})
    at = case.overflow_at

    def before(trainer: Trainer) -> None:
        if at is not None and job.transport.rank == job.transport.size - 1:
            spoil(trainer, at)

    trainer, trace = train_here(
        *(job, Grid(*case.layout), tiny_gpt(config), config.with_origins("tiny", {})),
        token_data(),
        validation=token_data(samples=24) if config.train.eval_steps else None,
        before=before,
        quiet=case.run_dir is None,
        resume=case.resume,
    )
    found = trainer.last_evaluation
    loss = None if found is None else found.loss
    return Outcome(trace, trainer.progress.loss_scale, loss, devices_of(trainer))


def devices_of(trainer: Trainer) -> set[str]:
    buffers: list[Tensor] = []
    for state in (layer.state for layer in trainer.layers):
        buffers += [state.gradient, *state.optimizer_state.stored().tensors]
        buffers += [tensor.parameter for tensor in state.owned]
    return {buffer.device.type for buffer in buffers}


def spoil(trainer: Trainer, step: int) -> None:
    """Make a kept entry of a gradient infinite, a pruned one's if this stage has some, in one
    microbatch of a step."""
    owned = [tensor for layer in trainer.layers for tensor in layer.state.owned]
    pruned = [tensor for tensor in owned if tensor.kept < tensor.parameter.numel()]
    tensor = (pruned or owned)[0]
    place = int(tensor.index.positions()[tensor.kept // 2])
    left = [1]

    def spoilt(gradient: Tensor) -> Tensor:
        if trainer.steps_done != step or not left:
            return gradient
        left.pop()
        changed = gradient.clone()
        changed.view(-1)[place] = torch.inf
        return changed

    tensor.parameter.register_hook(spoilt)


def main(job: Job) -> None:
    folder, rank = Path(sys.argv[1]), job.transport.rank
    for case in starmap(Case, json.loads(Path(sys.argv[2]).read_text())):
        found = train(job, case)
        torch.save(vars(found), folder / f"{case.name}.{rank}.pt")


# -- how tests start it ---------------------------------------------------------------------

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
LIMIT_SECONDS = 150
AT_ONCE = 10
"""Cases of a job: what they made of communicators and pinned memory is released at its end."""
ENVIRONMENT = {
    # cuBLAS adds in one order only with workspaces of a fixed size; torch asks for it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")])
    ),
}


def train_cases(
    folder: Path, cases: Sequence[Case], environment: Mapping[str, str] | None = None
) -> tuple[dict[str, list[Outcome]], str]:
    """The results of every rank for each case, and the output of a job that failed, which is the
    last; all cases have one layout."""
    [layout] = {one.layout for one in cases}
    ranks = math.prod(layout)
    found: dict[str, list[Outcome]] = {}
    for begin in range(0, len(cases), AT_ONCE):
        own = cases[begin : begin + AT_ONCE]
        job = _start(ranks, folder, own, environment or {})
        if job.returncode:
            return found, str(job)
        for one in own:
            files = [folder / f"{one.name}.{rank}.pt" for rank in range(ranks)]
            found[one.name] = [Outcome(**torch.load(file, weights_only=False)) for file in files]
    return found, ""


def _start(
    ranks: int, folder: Path, cases: Sequence[Case], environment: Mapping[str, str]
) -> Finished:
    listed = folder / "cases.json"
    listed.write_text(json.dumps([list(vars(one).values()) for one in cases], default=str))
    words = [str(TESTS / "gpu" / "ranks_training.py"), str(folder), str(listed)]
    own = {**ENVIRONMENT, **environment}
    if ranks == 1:
        return run_alone(words, env=own, timeout=LIMIT_SECONDS)
    return run_mpirun(ranks, words, env=own, timeout=LIMIT_SECONDS)


def joined(outcomes: Sequence[Outcome], kind: str) -> dict[str, Tensor]:
    """The tensors of a kind of all stages and tensor-parallel ranks by name, moments as
    `name/moment`; replicated tensors have the same bits."""
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        tensors: dict[str, Any] = getattr(outcome.trace, kind)
        if kind == "moments":
            tensors = {
                f"{n}/{m}": values for n, own in tensors.items() for m, values in own.items()
            }
        for name, values in tensors.items():
            before = found.setdefault(name, values)
            assert torch.equal(before, values), f"replicas differ in {kind} of {name}"
    return found


if __name__ == "__main__":
    run(main)
