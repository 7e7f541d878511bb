"""The model, the data and the settings of `ax.Trainer`, in one form each.

Data are opened on the ranks that read them, and their size is broadcast.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from axsparse.config.load import load_settings
from axsparse.config.messages import NEARNESS, show
from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import Config
from axsparse.config.validate import check_data
from axsparse.data.batches import Batches, integer_of
from axsparse.data.dataset import Dataset, Datasets, read_tensors
from axsparse.data.order import Share
from axsparse.data.sources import open_datasets
from axsparse.data.torch_dataset import SHIFTED, advice_for, reject_no_dataset
from axsparse.models.layer import LossFunction, MetricFunction, Model
from axsparse.models.losses import linear_cross_entropy, summed_cross_entropy
from axsparse.models.model_profile import check_arguments
from axsparse.models.module_buffers import replaced, same_attributes, slots
from axsparse.models.own_forward import by_folder, from_module
from axsparse.models.reached_objects import reaches, shares_with_hooks
from axsparse.models.sequential import (
    OwnValues,
    PlainModel,
    from_sequential,
    given_module,
    runs_in_order,
)
from axsparse.models.watched_forward import tensors_of
from axsparse.models.zoo.model_registry import named_model
from axsparse.pruning.criteria import Score
from axsparse.runtime.communication import Transport
from axsparse.runtime.console import Unit
from axsparse.runtime.errors import ConfigError, DataError, check_kind, check_kinds
from axsparse.runtime.exchange import together, value_of_first
from axsparse.runtime.seeds import preserved_rng, seed_all
from axsparse.runtime.targets import IGNORED
from axsparse.samo.optim.optimizer import LearningRate, Optimizer
from axsparse.training.checkpoint.checkpoint_folder import DataEntry
from axsparse.training.checkpoint.verification import Checkpoint, reject_other_data
from axsparse.training.plan import RunPlan, mismatching_rank


@dataclass(frozen=True)
class Hf:
    """The model and the weights of a Hugging Face folder; `ax.hf` makes one."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Token ids that lie in files; `ax.tokens` makes one."""

    settings: Mapping[str, Any]


def hf(folder: str | os.PathLike[str]) -> Hf:
    """The model of a Hugging Face folder of config.json and safetensors, at its weights.

    It is the setting `model.from`, which docs/howto/llama.md explains. Its loss does not shift: of
    custom data, the target of a position is the token that follows it.
    """
    check_kinds("hf", locals(), folder="path")
    return Hf({"model.from": os.fspath(folder)})


def tokens(
    path: str | os.PathLike[str], *, validation: str | os.PathLike[str] | None = None
) -> Tokens:
    """Token ids that `axsparse data prepare` wrote, or that are read where they lie.

    They are the settings `data.path` and `data.validation`, which docs/howto/data-formats.md
    explains. Without `validation`, evaluations read the validation part of `path`.
    """
    check_kinds("tokens", locals(), path="path", validation="path or None")
    settings = {"data.source": "tokens", "data.path": os.fspath(path)}
    if validation is not None:
        settings["data.validation"] = os.fspath(validation)
    return Tokens(settings)


def _reject_no_name(model: str) -> None:
    """ConfigError for a text, as the model, that is like no name of a model."""
    if not get_close_matches(model.lower(), FAMILIES, 1, NEARNESS):
        names = ", ".join(f'"{name}"' for name in FAMILIES if name != "hf")
        folder = repr(model) if Path(model).is_dir() else "FOLDER"
        raise ConfigError(
            f"Trainer: model is {show(model)}, and the models with a name are {names}; give "
            f"ax.hf({folder}) for the model of a Hugging Face folder, or an nn.Module and loss="
        )


ModelSource = Model | nn.Module | Hf | str | None
"""A model, a module, `ax.hf(folder)`, the name of a model such as "gpt", or None for the settings'
model."""
DataSource = Dataset | Sequence[Dataset] | Datasets | Tokens | Callable[[], Datasets] | None
"""Training data, a pair with validation data, `ax.tokens(path)`, a function that opens them where
they are read, or None for the settings' data."""


@dataclass(frozen=True)
class RunSources:
    """A model, data and settings, and the other arguments of `Trainer`."""

    model: Model
    open_datasets: Callable[[], Datasets]
    config: Config
    given: tuple[str, ...] = ()
    """The objects of the program that replace settings: keys of `validate.REPLACED`."""
    score: Score | None = None
    optimizer: Optimizer | None = None
    learning_rate: LearningRate | None = None
    quiet: bool = False
    resume: str | None = None
    overwrite: bool = False


# Reason: what a program gives.
def run_sources(
    model: ModelSource,
    data: DataSource,
    config: Config | Mapping[str, Any] | str | Path | None,
    settings: Mapping[str, Any],
    loss: LossFunction | None = None,
    metrics: Mapping[str, MetricFunction] = {},
) -> RunSources:
    """All of them in one form each; `loss` and `metrics` make a model of a module.

    Raises ConfigError for what has none of the forms, and what `configure` and `named_model` raise.
    """
    of_model: Mapping[str, Any] = {}
    if isinstance(model, Hf):
        of_model = model.settings
    elif isinstance(model, str):
        _reject_no_name(model)
        of_model = {"model.name": model}
    check_kind(
        "Trainer: model",
        model,
        Model | nn.Module | Hf | str | None,
        "give an nn.Module and loss=, an ax.Model, ax.hf(folder), or leave it out for that of the "
        "settings",
    )
    of_data = data.settings if isinstance(data, Tokens) else {}
    whole = load_settings(config, of_model, of_data, settings)
    kind = type(model).__name__
    if isinstance(model, nn.Module) and loss is None:
        way = "give loss=, which returns the summed loss of the outputs and the targets"
        if re.search("CausalLM|LMHead", kind):
            way = by_folder(model) or way
        raise ConfigError(f"Trainer: {kind} has no loss; {way}")
    if loss is not None and not isinstance(model, nn.Module):
        raise ConfigError(
            f"Trainer: loss is for an nn.Module, and model is {kind}; leave it out, since such a "
            "model has its loss"
        )
    if metrics and not isinstance(model, nn.Module | Model):
        raise ConfigError(
            f"Trainer: metrics are for a model of the program, and model is {kind}; leave them out"
        )
    check_kind("Trainer: metrics", metrics, Mapping, "give functions by their names")
    given = model.loss if isinstance(model, Model) else loss
    is_needed = isinstance(model, Model | nn.Module)
    if is_needed and (isinstance(given, type) or not callable(given)):
        shown = given.__name__ if isinstance(given, type) else repr(given)
        of_torch = getattr(given, "__module__", "") == nn.modules.loss.__name__
        raise ConfigError(
            f"Trainer: loss is {shown}, which is no function of outputs and targets; give one that "
            "returns the sum over a microbatch, such as torch.nn."
            f'{shown if of_torch else "MSELoss"}(reduction="sum")'
        )
    opener = _opener(data, whole)
    separate = whole.data.intra_document_attention
    has_data = data is not None and not isinstance(data, Tokens)
    if isinstance(model, Model):
        check_arguments(model)
        made = replace(model, metrics={**model.metrics, **metrics}) if metrics else model
        if isinstance(model.start, OwnValues):
            model.start.reject_replaced()
        modules = [module for layer in model.layers if (module := given_module(layer)) is not None]
        chain = PlainModel(OrderedDict((str(n), each) for n, each in enumerate(modules)))
        if len(modules) == len(model.layers) and _can_read(model.loss, chain):
            opener = cache(opener)
            _reject_reading_loss(chain, model.loss, *_first_samples(opener, separate))
    elif isinstance(model, nn.Module):
        assert loss is not None
        opener = cache(opener)
        made = _model_of(model, loss, metrics, partial(_first_samples, opener, separate))
    else:
        made = named_model(whole)
    if has_data and made.loss in (linear_cross_entropy, summed_cross_entropy):
        takes_more = is_needed or whole.data.intra_document_attention
        opener = partial(_of_next_tokens, opener, takes_more=takes_more)
    own = {"the model of the program": is_needed, "the data of the program": has_data}
    given_here = tuple(what for what, is_given in own.items() if is_given)
    return RunSources(made, opener, whole.named(made.name), given_here)


def _model_of(
    module: nn.Module,
    loss: LossFunction,
    metrics: Mapping[str, MetricFunction],
    first_samples: Callable[[], tuple[tuple[Tensor, ...], Tensor]],
) -> Model:
    """The model of a module, cut where the first samples pass from layer to layer."""
    if isinstance(module, nn.Sequential) and runs_in_order(module):
        model = from_sequential(module, loss, metrics=metrics)
        if _can_read(loss, module):
            _reject_reading_loss(module, loss, *first_samples())
        return model
    inputs, targets = first_samples()
    model = from_module(module, loss, lambda _: inputs, metrics=metrics)
    _reject_reading_loss(module, loss, inputs, targets)
    return replace(model, example=None)


def _can_read(loss: LossFunction, module: nn.Module) -> bool:
    """Whether a loss can read what a forward of a module leaves."""
    return reaches(loss, module.modules()) or shares_with_hooks(loss, module)


def _first_samples(
    open_datasets: Callable[[], object], separate: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    training = _open(open_datasets, separate).training
    with preserved_rng():
        inputs, targets = training.read(np.arange(min(2, len(training))))
    return tuple(inputs), targets


@torch.no_grad()
def _reject_reading_loss(
    module: nn.Module, loss: LossFunction, inputs: Sequence[Tensor], targets: Tensor
) -> None:
    """ConfigError for a loss that reads what a forward has left on the module, such as the loss of
    a router: in the run the layers leave it on their copies. A loss is called only where a forward
    leaves something, since it may keep tensors of the type and device that it sees first."""

    def summed() -> Any:
        with preserved_rng():
            seed_all(0, "loss")
            return loss(*(each.clone() for each in outputs), targets.clone())

    def contents() -> list[tuple[int, str, int]]:
        return [
            (place, name, id(value))
            for place, child in enumerate(module.modules())
            for name, value in (*vars(child).items(), *child._buffers.items())
        ]

    buffers = [(slot, slot.tensor.clone()) for slot in slots(module)]
    shares = shares_with_hooks(loss, module)
    outputs: list[Tensor] = []
    try:
        with preserved_rng(), same_attributes([module]), replaced(buffers):
            before = contents()
            outputs += tensors_of(module(*(each.clone() for each in inputs)))
            if contents() == before and not shares:
                return
            behind, again = summed(), summed()
            if shares:  # what hooks keep is now of another batch
                module(*(each[:1].clone() for each in inputs))
    except Exception:  # the loss may work for microbatches of one size or precision only
        return
    if not isinstance(behind, Tensor) or not torch.equal(behind, again):
        return
    try:
        is_same = torch.allclose(behind, summed())
    except Exception:  # what it reads is not there
        is_same = False
    if not is_same:
        raise ConfigError(
            "loss: gives another value once the module's forward has run, so it reads what that "
            f"leaves {'in an object of a hook' if shares else 'on the module'}; return it from the "
            "forward, as another output for the loss"
        )


def _opener(data: DataSource, config: Config) -> Callable[[], Datasets]:
    if data is None or isinstance(data, Tokens):
        return partial(open_datasets, config)
    if isinstance(data, FunctionType | partial | MethodType):
        return data
    if isinstance(data, tuple) or (isinstance(data, list) and any(map(_is_dataset, data))):
        if len(data) != 2:
            raise ConfigError(f"Trainer: data are {len(data)} data sets; give (train, validation)")
        data = Datasets(*data)
    datasets = data if isinstance(data, Datasets) else Datasets(cast(Dataset, data))
    return lambda: datasets


def _of_next_tokens(open_datasets: Callable[[], object], *, takes_more: bool) -> Datasets:
    """Open the datasets for a model that predicts next tokens, and `takes_more` than these.

    DataError if all targets of the first samples are the tokens at their own positions, like the
    labels of transformers. A token that repeats in a whole sample may follow itself.
    """
    opened = _open(open_datasets, False)
    training = opened.training
    first = np.arange(min(LABELLED, len(training)))
    with preserved_rng():
        *inputs, targets = read_tensors(training, first, first * 0)
    if getattr(training, "separator", None) is not None and not takes_more:
        raise DataError(
            f"data ({training.name}): samples have {len(inputs)} inputs, and the model takes "
            "tokens; leave the separator out, or set data.intra_document_attention: true"
        )
    if inputs and inputs[0].shape == targets.shape:
        is_own = (inputs[0] == targets) | (targets == IGNORED)
        differ = any(len(row[row != IGNORED].unique()) > 1 for row in targets)
        if differ and bool(is_own.all()):
            raise DataError(
                f"data ({training.name}): the targets are the inputs, and the model predicts the "
                f"tokens that follow; give {SHIFTED}"
            )
    return opened


def _is_dataset(given: object) -> bool:
    """Whether it is meant as a data set, and not as a sample."""
    return hasattr(given, "read") or isinstance(given, DataLoader | torch.utils.data.Dataset)


@dataclass(frozen=True)
class Data:
    """One rank's training and validation batches.

    Stages in between the first and the last know only how many samples there are.
    """

    entry: DataEntry
    """The entry of the training data in a checkpoint, with the position at their beginning."""
    training: Batches
    validation: Batches | None
    unit: Unit
    """The unit of a target: a token, or a sample."""
    validation_fingerprint: str
    """The fingerprint of the validation data; empty without."""


def batches_of(
    dataset: Dataset | None, config: Config, words: int | None, *, num_samples: int, **how: Any
) -> Batches:
    """Batches of a configuration, all of which one replica reads unless `how`, for `Batches`, says
    else."""
    return Batches(
        dataset,
        num_samples=num_samples,
        global_batch_size=config.batch.global_batch_size,
        microbatch_size=config.batch.microbatch_size,
        seed=config.seed,
        vocab_size=words,
        **how,
    )


def open_data(
    plan: RunPlan,
    config: Config,
    transport: Transport,
    open_datasets: Callable[[], Datasets],
    *,
    saved: Checkpoint | None = None,
    pinned: bool = False,
) -> Data:
    """Open the data on the first and last stage, and broadcast its size to all ranks.

    With `pinned`, batches are put into pinned memory, from which a GPU copies without waiting.

    Raises on all ranks the error of opening on any, DataError if two ranks read different data or
    if the checkpoint `saved` is of other data, and the errors of `check_data`.
    """
    reads = plan.coords.is_first or plan.coords.is_last
    separate = config.data.intra_document_attention
    datasets = together(transport, lambda: _open(open_datasets, separate) if reads else None)
    read_here = None if datasets is None else facts_of(datasets)
    together(transport, lambda: _reject_other_data(transport, read_here))
    # Rank 0 is a first stage, which reads.
    facts = value_of_first(transport, read_here)
    words = plan.model.vocab_size
    entry = together(transport, lambda: checked_entry(config, words, facts, saved))
    if not facts["validation_samples"]:
        together(transport, lambda: _reject_idle(config))
    batches = partial(
        batches_of,
        config=plan.config,
        words=words,
        replica=plan.coords.replica,
        g_data=plan.coords.grid.g_data,
        pinned=pinned,
    )
    training = batches(
        None if datasets is None else datasets.training,
        num_samples=facts["samples"],
        shares=tuple(Share(*share) for share in facts["shares"]),
    )
    validation = None
    if facts["validation_samples"]:
        dataset = None if datasets is None else datasets.validation
        validation = batches(dataset, num_samples=facts["validation_samples"])
    unit: Unit = "tokens" if facts["vocab_size"] else "samples"
    return Data(entry, training, validation, unit, facts["validation_fingerprint"])


def checked_entry(
    config: Config,
    words: int | None,
    facts: Mapping[str, Any],
    saved: Checkpoint | None,
    way: str = "start another run",
) -> DataEntry:
    """The entry of training data in a checkpoint, by their `facts_of`, for a model of this many
    `words`. Raises the errors of `check_data` and, for a checkpoint, of `reject_other_data`."""
    name, samples = facts["name"], facts["samples"]
    entry = DataEntry(name=name, fingerprint=facts["fingerprint"], samples=samples, position=0)
    if saved is not None:
        reject_other_data(saved, entry, way)
    check_data(config, source=name, words=words, vocab_size=facts["vocab_size"])
    return entry


def with_example(
    model: Model, config: Config, transport: Transport, open_datasets: Callable[[], Datasets]
) -> Model:
    """The model with an example: the first microbatch of the training data, if it has none.

    Rank 0 opens the data and has the values; the other ranks learn shapes and types. All ranks call
    this together. Raises on all ranks what opening and reading raise.
    """
    if model.example is not None:
        return model

    def first_inputs() -> tuple[Tensor, ...]:
        if transport.rank:
            return ()
        training = _open(open_datasets, config.data.intra_document_attention).training
        with preserved_rng():
            batches = batches_of(training, config, model.vocab_size, num_samples=len(training))
            return batches.first(config.batch.microbatch_size)[0].inputs

    inputs = together(transport, first_inputs)
    kinds = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in inputs]
    known = value_of_first(transport, kinds)
    if transport.rank:
        inputs = tuple(
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in known
        )
    return replace(model, example=lambda _: inputs)


def _reject_idle(config: Config) -> None:
    """ConfigError for an evaluation that was asked for, and that has no data."""
    values, usual = config.by_key(), Config().by_key()
    asked = []
    for key in ("train.eval_steps", "train.eval_first", "checkpoint.keep_best", "train.eval_every"):
        origin, value = config.origins.get(key, "configure"), values[key]
        # The config.yaml of a run has all settings, and its defaults ask for nothing.
        is_set = origin != "configure" and (value != usual[key] or ":" not in origin)
        asked += [key] * (is_set and bool(value))
    if asked and asked != ["train.eval_every"]:
        key, *others = asked
        these = " and ".join(["it", *others])
        raise ConfigError(
            f"{config.where(key)}: {show(values[key])} is for evaluations, and there are no "
            "validation data; give them (data=(training, validation), data.validation), or "
            f"leave {these} out"
        )


LABELLED = 4
"""Samples of which targets are compared with the inputs."""


def _open(open_datasets: Callable[[], object], separate: bool) -> Datasets:
    """Open the datasets; DataError if they are none, or do not separate documents as asked."""
    opened = open_datasets()
    if not isinstance(opened, Datasets):
        suggestion = f"; for each, {advice_for(opened)}" if isinstance(opened, DataLoader) else ""
        raise DataError(
            f"data: open_datasets returned {type(opened).__name__}; return "
            f"Datasets(training, validation){suggestion}"
        )
    datasets = [opened.training] + ([] if opened.validation is None else [opened.validation])
    for dataset in datasets:
        reject_no_dataset("data", dataset)
        if dataset.targets_per_sample is not None:
            per_sample = f"{dataset.name}: targets_per_sample"
            integer_of(dataset.targets_per_sample, per_sample, least=1)
        if separate and getattr(dataset, "separator", None) is None:
            raise DataError(
                f"data.intra_document_attention: {dataset.name} has no ends of documents; choose "
                "false, or give a TokenDataset with the separator that ends them"
            )
    return opened


def facts_of(datasets: Datasets) -> dict[str, Any]:
    """The facts that the other ranks need about the data, and that reading ranks compare."""
    training, validation = datasets.training, datasets.validation
    for given in (training, *([] if validation is None else [validation])):
        named = {"name": given.name, "fingerprint": given.fingerprint}
        check_kinds("data", named, name="text", fingerprint="text")
    return {
        "name": training.name,
        "fingerprint": training.fingerprint,
        "vocab_size": training.vocab_size or 0,
        "samples": len(training),
        "shares": getattr(training, "shares", ()),
        "validation_samples": 0 if validation is None else len(validation),
        "validation_fingerprint": "" if validation is None else validation.fingerprint,
    }


def _reject_other_data(transport: Transport, facts: Mapping[str, Any] | None) -> None:
    """DataError if two ranks that read data differ in a fact; None on the other ranks."""
    odd = mismatching_rank(transport, facts and {key: str(value) for key, value in facts.items()})
    if odd is not None:
        raise DataError(
            f"data: {odd[1]}; give all hosts the same data, and what is drawn the same seed "
            "(torch.manual_seed)"
        )
