"""The model of a checkpoint in one process: opened as plain modules, evaluated, and continuing a
text. Nothing of it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.config.schema import Config, sample_length
from axsparse.config.validate import check_data
from axsparse.data.batches import Batches
from axsparse.data.dataset import Dataset, Datasets
from axsparse.models.layer import Model, as_tuple
from axsparse.models.sequential import filled_modules
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.policy import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport, LocalWorld
from axsparse.samo.precision import DTYPES
from axsparse.training.checkpoint.checkpoint_folder import DataEntry
from axsparse.training.checkpoint.verification import (
    Checkpoint,
    checkpoint_of,
    reject_other_data,
)
from axsparse.training.evaluation import Evaluation, evaluate
from axsparse.training.export import Weights, configured_model


@dataclass(frozen=True)
class SavedModel:
    """A model with the weights of a checkpoint, on the CPU and in evaluation mode."""

    checkpoint: Checkpoint
    config: Config
    model: Model
    modules: list[nn.Module]
    """The modules of the model's layers, in order. Both uses of a tied weight are one tensor."""


def open_saved_model(run: Path, step: int | Literal["best"] | None, *, trained: bool) -> SavedModel:
    """Read a model of a run, from the checkpoint of `step` or from the newest.

    With `trained` the weights are those that training computes with, in its precision;
    otherwise they are the fp32 masters.

    Raises ConfigError if the run trained a model of the user's own, which its configuration does
    not describe, and what `checkpoint_of` and `Weights` raise.
    """
    weights = Weights(checkpoint_of(run, step), trained=trained)
    config = weights.config().with_origins(run.name, {})
    shapes = {name: entry.shape for name, entry in weights.parameters.items()}
    suggestion = (
        f"{weights.checkpoint.path}: is of a model of your own",
        "in Python, ax.Trainer(…, resume=RUN).evaluate() evaluates it, and ax.load gives its "
        "weights",
    )
    model, profiled = configured_model(config, shapes, suggestion)
    modules = filled_modules(model, profiled.ties, weights.tensors())
    for module in modules.values():
        module.requires_grad_(requires_grad=False)
    return SavedModel(weights.checkpoint, config, model, list(modules.values()))


# -- evaluation ---------------------------------------------------------------------------


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
    validation = _validation_data(saved, datasets)
    torch.set_num_threads(config.train.threads)
    transport = LocalTransport(LocalWorld[object](1), 0)
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
    )
    engine = Engine(
        Rank(coords, transport.backoff, Phases()),
        stage,
        transport.link(coords),
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
        vocab_size=model.vocab_size,
    )
    return evaluate(
        engine,
        batches,
        number,
        tuple(model.metrics),
        transport=transport,
        coords=coords,
        after_batch=after_batch,
    )


def _validation_data(saved: SavedModel, datasets: Datasets) -> Dataset:
    training, validation = datasets.training, datasets.validation
    data = DataEntry(
        name=training.name, fingerprint=training.fingerprint, samples=len(training), position=0
    )
    reject_other_data(saved.checkpoint, data)
    if validation is None:
        raise ConfigError(f"evaluate: {training.name} has no validation data; nothing to do")
    check_data(
        saved.config,
        source=training.name,
        words=saved.model.vocab_size,
        vocab_size=training.vocab_size or 0,
        num_samples=len(training),
    )
    return validation


# -- texts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """The rule that chooses the next token among the likely ones."""

    temperature: float = 0.0
    """Logits are divided by it before a token is drawn; 0 takes the most likely one."""
    top_k: int | None = None
    """Only so many of the most likely tokens may be drawn; None: all."""
    seed: int = 0


def continuation(
    saved: SavedModel, prompt: Sequence[int], tokens: int, end: int, sampling: Sampling
) -> Iterator[int]:
    """At most `tokens` tokens that follow the prompt, up to and without the token `end`.

    The prompt has at least one token. The model sees no more of the text than the last tokens
    that fit into one sample of its training. Equal arguments give equal tokens.
    """
    window = sample_length(saved.config)
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    for _ in range(tokens):
        token = _chosen(_next_logits(saved, text[-window:]), sampling, generator)
        if token == end:
            return
        text.append(token)
        yield token


@torch.no_grad()
def _next_logits(saved: SavedModel, text: Sequence[int]) -> Tensor:
    """The logits of the token that follows, (V,) in fp32."""
    outputs: tuple[Tensor, ...] = (torch.tensor([text]),)
    for layer, module in zip(saved.model.layers, saved.modules, strict=True):
        outputs = as_tuple(layer.name, module(*outputs))
    if len(outputs) == 1:
        return outputs[0][0, -1].float()
    hidden, weight = outputs  # The head leaves this product to the loss.
    return F.linear(hidden[0, -1], weight).float()


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # In fp64 the largest difference over a small temperature is no overflow.
    shares = ((logits.double() - logits.max()) / sampling.temperature).softmax(dim=0)
    return int(torch.multinomial(shares, 1, generator=generator))
