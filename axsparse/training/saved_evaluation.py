"""Evaluates the model of a checkpoint in one process, as its run did on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from axsparse.config.schema import Config
from axsparse.config.validate import check_data
from axsparse.data.batches import Batches
from axsparse.data.dataset import Dataset, Datasets, PartedDataset
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.runtime.half_products import multiply_in_fp32
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.precision import DTYPES
from axsparse.training.checkpoint.compatibility import refuse_other_data
from axsparse.training.checkpoint.manifest import DataEntry
from axsparse.training.evaluation import Evaluation, evaluate
from axsparse.training.saved_model import SavedModel


def evaluate_saved(
    saved: SavedModel,
    datasets: Datasets,
    number: int | Literal["all"],
    after_batch: Callable[[int, int], object] = lambda _done, _wanted: None,
) -> Evaluation:
    """Evaluate on the first `number` global batches of the validation data, or on all.

    `after_batch` is called with how many are done and how many are wanted. The model must have its
    trained weights. Microbatches, precision and the number of threads are those of the run, so
    that on the same kind of machine the result is the same.

    Raises ConfigError if there are no validation data, DataError if the data are not the run's.
    """
    config, model = saved.loaded.config, saved.model
    validation = _validation_data(saved, datasets)
    _prepare_process(config)
    transport = LocalTransport(LocalWorld[object](1), 0)
    place = Grid(1, 1).place(0)
    stage = Stage(
        [
            LayerRunner(layer.name, module, is_recomputed=False)
            for layer, module in zip(model.layers, saved.modules, strict=True)
        ],
        loss=model.loss,
        metrics=model.metrics,
        input_dtype=DTYPES[config.precision],
        seed=config.seed,
    )
    engine = Engine(
        Rank(place, transport.backoff, Phases()),
        stage,
        transport.link(place),
        schedule=Schedule("message-driven", 0, "alternate"),
        while_idle=lambda: None,
    )
    batches = Batches(
        validation,
        num_samples=len(validation),
        global_batch_size=config.batch.global_batch_size,
        microbatch_size=config.batch.microbatch_size,
        replica=0,
        g_data=1,
        seed=config.seed,
    )
    try:
        return evaluate(
            engine,
            batches,
            number,
            tuple(model.metrics),
            transport=transport,
            place=place,
            after_batch=after_batch,
        )
    finally:
        batches.close()


def _validation_data(saved: SavedModel, datasets: Datasets) -> Dataset | PartedDataset:
    """The validation data, after a check that the data are those of the run."""
    training, validation = datasets.training, datasets.validation
    data = DataEntry(
        name=training.name, fingerprint=training.fingerprint, samples=len(training), position=0
    )
    refuse_other_data(saved.checkpoint, data)
    if validation is None:
        raise ConfigError(f"evaluate: {training.name} has no validation data; nothing to do")
    check_data(
        saved.loaded,
        source=training.name,
        words=saved.model.vocab_size,
        vocab_size=training.vocab_size or 0,
        num_samples=len(training),
    )
    return validation


def _prepare_process(config: Config) -> None:
    """Compute as the ranks of the run do."""
    torch.set_num_threads(config.train.threads)
    multiply_in_fp32(DTYPES[config.precision])
