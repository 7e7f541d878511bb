"""Opens the data on the ranks that read it, and broadcasts its size to all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from axsparse.config.messages import show
from axsparse.config.schema import Config
from axsparse.config.validate import check_data
from axsparse.data.batches import Batches, integer_of
from axsparse.data.dataset import Datasets, length_of
from axsparse.data.order import Share
from axsparse.data.torch_dataset import advice_for
from axsparse.models.layer import Model
from axsparse.runtime.communication import Transport
from axsparse.runtime.console import Unit
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.exchange import text_of_first, together
from axsparse.runtime.seeds import preserved_rng
from axsparse.training.checkpoint.manifest import DataEntry
from axsparse.training.plan import RunPlan, mismatching_rank


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


def open_data(
    plan: RunPlan,
    config: Config,
    transport: Transport,
    open_datasets: Callable[[], Datasets],
    *,
    pinned: bool = False,
) -> Data:
    """Open the data on the first and last stage, and broadcast its size to all ranks.

    With `pinned`, batches are put into pinned memory, from which a GPU copies without waiting.

    Raises on all ranks the error of opening on any, DataError if two ranks read different data, and
    the errors of `check_data`.
    """
    reads = plan.coords.is_first or plan.coords.is_last
    separate = config.data.intra_document_attention
    datasets = together(transport, lambda: _open(open_datasets, separate) if reads else None)
    read_here = None if datasets is None else _facts_of(datasets)
    together(transport, lambda: _reject_other_data(transport, read_here))
    # Rank 0 is a first stage, which reads.
    facts = json.loads(text_of_first(transport, json.dumps(read_here)))
    together(
        transport,
        lambda: check_data(
            config,
            source=facts["name"],
            words=plan.model.vocab_size,
            vocab_size=facts["vocab_size"],
            num_samples=facts["samples"],
        ),
    )

    batches = partial(
        Batches,
        global_batch_size=plan.config.batch.global_batch_size,
        microbatch_size=plan.config.batch.microbatch_size,
        replica=plan.coords.replica,
        g_data=plan.coords.grid.g_data,
        seed=plan.config.seed,
        vocab_size=plan.model.vocab_size,
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
    else:
        together(transport, lambda: _reject_idle(config))
    known = {key: facts[key] for key in ("name", "fingerprint", "samples")}
    unit: Unit = "tokens" if facts["vocab_size"] else "samples"
    return Data(DataEntry(**known, position=0), training, validation, unit)


def with_example(
    model: Model,
    config: Config,
    transport: Transport,
    open_datasets: Callable[[], Datasets],
) -> Model:
    """The model with an example: the first microbatch of the training data, if it has none.

    Rank 0 opens the data and has the values; the other ranks learn shapes and types. All ranks call
    this together. Raises on all ranks what opening and reading raise.
    """
    if model.example is not None:
        return model
    size, separate = config.batch.microbatch_size, config.data.intra_document_attention

    def first_inputs() -> tuple[Tensor, ...]:
        if transport.rank:
            return ()
        training = _open(open_datasets, separate).training
        with preserved_rng():
            batches = Batches(
                training,
                num_samples=length_of(training, training.name),
                global_batch_size=size,
                microbatch_size=size,
                replica=0,
                g_data=1,
                seed=config.seed,
                vocab_size=model.vocab_size,
            )
            return batches.first(size)[0].inputs

    inputs = together(transport, first_inputs)
    kinds = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in inputs]
    known = json.loads(text_of_first(transport, json.dumps(kinds)))
    if transport.rank:
        inputs = tuple(
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in known
        )
    return replace(model, example=lambda _: inputs)


def _reject_idle(config: Config) -> None:
    """ConfigError for an evaluation that was asked for, and that has no data."""
    values, usual = config.by_key(), Config().by_key()
    for key in ("train.eval_steps", "train.eval_first", "checkpoint.keep_best"):
        origin, value = config.origins.get(key, "configure"), values[key]
        # The config.yaml of a run has all settings, and its defaults ask for nothing.
        is_set = origin != "configure" and (value != usual[key] or ":" not in origin)
        if value and is_set:
            raise ConfigError(
                f"{config.where(key)}: {show(value)} is for evaluations, and there are no "
                "validation data; give them (data=(training, validation), data.validation), or "
                "leave it out"
            )


MEMBERS = (
    *("name", "fingerprint", "vocab_size", "targets_per_sample"),
    *("__len__", "count_targets", "read"),
)


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
        missing = [member for member in MEMBERS if not hasattr(dataset, member)]
        if missing:
            raise DataError(
                f"data: {type(dataset).__name__} has no {', '.join(missing)}, which data sets "
                f"have; {advice_for(dataset)}"
            )
        if dataset.targets_per_sample is not None:
            per_sample = f"{dataset.name}: targets_per_sample"
            integer_of(dataset.targets_per_sample, per_sample, least=1)
        if separate and getattr(dataset, "separator", None) is None:
            raise DataError(
                f"data.intra_document_attention: {dataset.name} has no ends of documents; choose "
                "false, "
                "or give a TokenDataset with the separator that ends them"
            )
    return opened


def _facts_of(datasets: Datasets) -> dict[str, Any]:
    """The facts that the other ranks need about the data, and that reading ranks compare."""
    training, validation = datasets.training, datasets.validation
    return {
        "name": training.name,
        "fingerprint": training.fingerprint,
        "vocab_size": training.vocab_size or 0,
        "samples": length_of(training, training.name),
        "shares": getattr(training, "shares", ()),
        "validation_samples": 0 if validation is None else length_of(validation, validation.name),
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
