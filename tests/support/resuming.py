"""Runs that save, stop and resume, in this process, and all that they leave."""

from __future__ import annotations

import copy
import hashlib
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.runs import around_step, on_ranks, tiny_gpt, token_data, with_layout
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset, Datasets
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile
from axsparse.models.module_buffers import slots
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError, StoppedError
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.samo.layer_construction import full_weights
from axsparse.training.export import export
from axsparse.training.placement import Placement
from axsparse.training.progress import Progress
from axsparse.training.trainer import Trainer, build

Layout = tuple[int, int]


@dataclass
class Ran:
    """The steps of a run, and its state at its end."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Weights, masters, moments and kept positions of all stages, by kind and global name."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """The first replica's."""
    progress: Progress | None = None
    stopped: str | None = None


def ran(
    layout: Layout | tuple[int, int, int],
    config: Config,
    run_dir: Path,
    *,
    model: Callable[[Config], Model] = tiny_gpt,
    data: Dataset | None = None,
    validation: Dataset | None = None,
    resume: str | None = None,
    stop_after: int | None = None,
    order: int | None = None,
    look: Callable[[Trainer], None] = lambda trainer: None,
    placement: Callable[[Transport], Placement] | None = None,
    **own: Any,
) -> Ran:
    """Train, until a signal after a step if one is given; `order` draws an arrival order, `look`
    sees each trainer at the start, `placement` says where else than on the CPU, `own` is for
    `build`."""
    grid = Grid(*layout)
    found, failures = Ran(), list[AxsparseError]()
    config = with_layout(config, grid).model_copy(update={"run_dir": str(run_dir)})
    source = config.with_origins("tiny", {"run_dir": "--run-dir"})
    datasets = Datasets(data or token_data(), validation)

    def body(transport: Transport) -> None:
        job = Job(transport)
        job.placement = None if placement is None else placement(job.transport)
        trainer = build(job, model(config), lambda: datasets, source, resume=resume, **own)
        look(trainer)

        def hear(trainer: Trainer) -> None:
            # One rank hears of it while a step is under way; all stop after that step.
            if trainer.steps_done + 1 == stop_after and transport.rank == grid.size - 1:
                job.stop.receive(signal.SIGUSR1)

        def note(step: int, verdict: StepResult) -> None:
            found.losses[step] = verdict.loss
            found.norms[step] = verdict.grad_norm
            found.scales[step] = trainer.progress.loss_scale

        around_step(hear)(trainer)
        try:
            trainer.train(note)
        except StoppedError as stopped:
            found.stopped = str(stopped)
        except AxsparseError as failure:
            if not failure.on_all_ranks:
                raise
            # The others are still to raise it; a failure here and now would end them.
            failures.append(failure)
        note_state(found, trainer)

    on_ranks(grid.size, body, order)
    assert len(failures) in (0, grid.size), "some ranks did not hear of the failure"
    if failures:
        raise failures[0]
    return found


def note_state(found: Ran, trainer: Trainer) -> None:
    """Add the state of one rank to the other ranks'."""
    found.progress = copy.deepcopy(trainer.progress)
    for layer in trainer.layers:
        state = layer.state
        weights = {name: weight.cpu().clone() for name, weight in full_weights(layer)}
        for name in state.by_full_name:
            values = {
                "weight": weights[layer.spec.local_name(name)],
                "kept": state.mask(name).nonzero()[:, 0],
                "master": state.master(name),
                **{m: state.moment(name, m) for m in state.optimizer_state.moments_K},
            }
            for kind, value in values.items():
                before = found.state.setdefault(f"{kind}/{name}", value.clone())
                assert torch.equal(before, value), f"replicas differ in {kind} of {name}"
        if trainer.coords.replica == 0:
            for slot in slots(layer.module):
                found.buffers[f"{layer.spec.name}.{slot.name}"] = slot.tensor.clone().cpu()


def same(ours: Ran, reference: Ran) -> None:
    """Losses, norms, loss scales of the steps that `ours` did, and all state: the same bits."""
    assert ours.losses and ours.losses.keys() <= reference.losses.keys()
    for name in ("losses", "norms", "scales"):
        mine, other = getattr(ours, name), getattr(reference, name)
        # As text: NaN is no other than itself.
        assert str(mine) == str({step: other[step] for step in mine}), name
    assert ours.progress == reference.progress
    same_state(ours, reference)


def same_state(ours: Ran, reference: Ran) -> None:
    """All state is the same bits; the second use of the tied weight is where stages need it."""
    assert ours.state
    for key, value in ours.state.items():
        expected = reference.state.get(key)
        if expected is None:
            expected = reference.state[key.replace("head.weight", "embed.token.weight")]
        assert _bits(value).equal(_bits(expected)), key
    assert ours.buffers.keys() == reference.buffers.keys()
    for key, value in ours.buffers.items():
        assert value.equal(reference.buffers[key]), key


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def signed(manifest: str) -> bytes:
    """A manifest with the hash that belongs to it, as a forger would write it."""
    head = manifest.encode(errors="surrogatepass").removesuffix(b"}")
    return head + b',"sha256":"' + hashlib.sha256(head).hexdigest().encode() + b'"}\n'


def records_of(run: Path, key: str = "step") -> list[dict[str, Any]]:
    """The records in the metrics of a run that have a key, such as "loss" or "eval_loss"."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if key in record]


def settings(config: Config, **sections: Any) -> Config:
    """A configuration with some keys of its sections changed."""
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=value)
            if isinstance(value, dict)
            else value
            for name, value in sections.items()
        }
    )


def train_and_save(
    layout: tuple[int, int], model: Model, config: Config, path: Path, *, trained: bool = False
) -> dict[str, Tensor]:
    """Train on all ranks and export for transformers; the masters, as `dense_state` has them."""
    run = path.with_name(f"{path.name}-run")
    found = ran(layout, settings(config, checkpoint={"every": 100}), run, model=lambda _: model)
    export(run, "hf", path, trained=trained)
    return dense_state(found, model)


def dense_state(found: Ran, model: Model, kind: str = "master") -> dict[str, Tensor]:
    """Trained parameters of a run by global name, a tied one once, and buffers."""
    profiled = profile(model)
    tensors = {}
    for name, shape in profiled.shapes.items():
        if f"kept/{name}" in found.state:
            values = found.state[f"{kind}/{name}"]
            if kind == "master":
                dense = torch.zeros(int(np.prod(shape)))
                dense[found.state[f"kept/{name}"]] = values
                values = dense
            tensors[name] = values.view(shape)
    return {**tensors, **found.buffers}
