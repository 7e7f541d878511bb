"""Evaluates a model on validation batches; the results are the same in every layout.

`evaluate` is a part of training, `evaluate_saved` has the model of a checkpoint in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from axsparse.config.schema import Config
from axsparse.data.batches import Batches, Prefetcher
from axsparse.data.dataset import Datasets
from axsparse.models.layer import Model
from axsparse.models.losses import SUMS
from axsparse.models.sequential import filled_modules
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.policy import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError, DataError, everywhere
from axsparse.runtime.exchange import exact_sum, gather_numbers
from axsparse.runtime.grid import Grid, RankCoords
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.samo.backend import to_host
from axsparse.samo.precision import DTYPES
from axsparse.training.checkpoint.verification import Checkpoint, checkpoint_of
from axsparse.training.export import Weights, configured_model
from axsparse.training.run_sources import batches_of, checked_entry, facts_of


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, the same on all ranks."""

    loss: float
    """Mean loss of a target."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The fraction of the targets that each of the model's metrics counted, by its name."""
    samples: int = 0
    """How many samples of the validation data it was made on."""
    available: int = 0
    """How many samples the validation data has."""


# Reason: the engine and its data, the ranks that take part, and the callback for progress.
def evaluate(
    engine: Engine,
    batches: Batches,
    number: int | Literal["all"],
    metrics: Sequence[str],
    *,
    transport: Transport,
    coords: RankCoords,
    after_batch: Callable[[int, int], object] = lambda _done, _wanted: None,
) -> Evaluation:
    """Evaluate the first `number` validation batches, or all of them.

    `after_batch` is called with how many batches are done and how many are wanted.

    All ranks call this together. Only forward passes are run. Losses and counts of entire
    microbatches, which no layout divides, are added exactly and rounded once, so that their order
    does not matter. `metrics` names the model's metrics. DataError on all ranks if no target
    counts.
    """
    available = batches.num_evaluation_batches
    asked = available if number == "all" else min(number, available)
    found: list[list[float]] = [[] for _ in ("loss", *metrics)]
    targets = 0.0
    with closing(Prefetcher(batches.evaluation, first_step=0, end=asked)) as prefetcher:
        for step in range(asked):
            batch = prefetcher.get(step)
            for row in to_host(engine.evaluate(batch)):
                if coords.tp_rank:  # all tensor-parallel ranks of the last stage have the same
                    continue
                for values, value in zip(found, row.tolist(), strict=True):
                    values.append(value)
            if coords.is_last and coords.tp_rank == 0:
                targets += batch.num_targets
            after_batch(step + 1, asked)
    for layer in engine.stage.layers:
        layer.end_evaluation()
    own = [targets, *chain.from_iterable(map(exact_sum, found))]
    counted, *columns = zip(*gather_numbers(transport, own), strict=True)
    total_targets = sum(counted)
    if not total_targets:
        raise everywhere(DataError("data: none of the samples of an evaluation has a target"))
    pairs = zip(columns[::2], columns[1::2], strict=True)
    loss, *totals = (exact_sum([*sums, *remainders])[0] for sums, remainders in pairs)
    return Evaluation(
        loss / total_targets,
        {name: total / total_targets for name, total in zip(metrics, totals, strict=True)},
        samples=min(asked * batches.global_batch_size, batches.num_samples),
        available=batches.num_samples,
    )


# -- the model of a checkpoint ----------------------------------------------------------


@dataclass(frozen=True)
class SavedModel:
    """A model with the weights of a checkpoint, on the CPU and in evaluation mode."""

    checkpoint: Checkpoint
    config: Config
    model: Model
    modules: list[nn.Module]
    """The modules of the model's layers, in order. Both uses of a tied weight are one tensor."""


def open_saved_model(run: Path, step: int | Literal["best"] | None) -> SavedModel:
    """Read a model of a run, from the checkpoint of `step` or from the newest, with the weights
    that training computes with, in its precision.

    Raises ConfigError if the run trained a model of the user's own, which its configuration does
    not describe, and what `checkpoint_of` and `Weights` raise.
    """
    weights = Weights(checkpoint_of(run, step), trained=True)
    config = weights.config().with_origins(run.name, {})
    model, profiled = configured_model(config, weights.shapes(), weights.checkpoint.path)
    modules = filled_modules(model, profiled.ties, weights.tensors())
    for module in modules.values():
        module.requires_grad_(requires_grad=False)
    return SavedModel(weights.checkpoint, config, model, list(modules.values()))


def evaluate_saved(
    saved: SavedModel,
    datasets: Datasets,
    number: int | Literal["all"],
    after_batch: Callable[[int, int], object] = lambda _done, _wanted: None,
) -> Evaluation:
    """Evaluate on the first `number` global batches of the validation data, or on all.

    `after_batch` is called with how many batches are done and how many are to be done. The model
    must have its trained weights. Microbatches, precision and the number of threads are the run's,
    so that on the same kind of machine the result is the same.

    Raises ConfigError if there are no validation data, DataError if the data are not the run's.
    """
    config, model = saved.config, saved.model
    facts, validation = facts_of(datasets), datasets.validation
    way = (
        "evaluate on data of a program by ax.Trainer(…, resume=RUN).evaluate(), with "
        "train.eval_steps"
    )
    checked_entry(config, model.vocab_size, facts, saved.checkpoint, way)
    if validation is None:
        raise ConfigError(f"evaluate: {facts['name']} has no validation data; nothing to do")
    torch.set_num_threads(config.train.threads)
    transport = LocalTransport()
    coords = Grid(1, 1).coords(0)
    stage = Stage(
        [
            LayerRunner(layer.name, module, is_recomputed=False)
            for layer, module in zip(model.layers, saved.modules, strict=True)
        ],
        loss=model.loss,
        metrics=model.metrics,
        input_dtype=DTYPES[config.precision],
        seed=config.seed,
        loss_is_known=model.loss in SUMS,
    )
    engine = Engine(
        Rank(coords, transport.backoff, Phases()),
        stage,
        transport.link(coords),
        schedule=Schedule("message-driven", 0),
        while_idle=lambda: None,
    )
    batches = batches_of(validation, config, model.vocab_size, num_samples=len(validation))
    return evaluate(
        engine,
        batches,
        number,
        tuple(model.metrics),
        transport=transport,
        coords=coords,
        after_batch=after_batch,
    )
