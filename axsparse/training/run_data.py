"""Opens the data on the ranks that read it, and tells all ranks its size."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axsparse.config.load import LoadedConfig
from axsparse.config.validate import check_data
from axsparse.data.batches import Batches
from axsparse.data.dataset import Dataset, Datasets, PartedDataset
from axsparse.runtime.communication import Transport
from axsparse.runtime.console import Unit
from axsparse.runtime.errors import DataError
from axsparse.runtime.exchange import gather_texts, sum_of, text_of_first, together
from axsparse.training.checkpoint.manifest import DataEntry
from axsparse.training.resolution import RunSpec


@dataclass(frozen=True)
class Data:
    """One rank's training and validation batches.

    Stages in between the first and the last know only how many samples there are.
    """

    name: str
    training: Batches
    validation: Batches | None
    unit: Unit
    """What is counted as a target: a token, or a sample."""
    fingerprint: str
    """The fingerprint of the training samples."""

    @property
    def entry(self) -> DataEntry:
        """The training data as a checkpoint names them, at their beginning."""
        return DataEntry(
            name=self.name,
            fingerprint=self.fingerprint,
            samples=self.training.num_samples,
            position=0,
        )


def open_data(
    run: RunSpec,
    loaded: LoadedConfig,
    transport: Transport,
    open_datasets: Callable[[], Datasets],
    *,
    pinned: bool = False,
) -> Data:
    """Open the data on the first and last stage, and tell all ranks its size.

    With `pinned`, batches are put into pinned memory, from which a GPU copies without waiting.

    Raises on all ranks what opening raised on any, DataError if two ranks read different
    data, and what `check_data` raises.
    """
    reads = run.place.is_first or run.place.is_last
    separate = loaded.config.data.separate_documents
    datasets = together(transport, lambda: _open(open_datasets, separate) if reads else None)
    own = "" if datasets is None else json.dumps(_facts_of(datasets))
    facts = together(transport, lambda: _common_facts(transport, own))
    together(
        transport,
        lambda: check_data(
            loaded,
            source=facts["name"],
            words=run.model.vocab_size,
            vocab_size=facts["vocab_size"],
            num_samples=facts["samples"],
        ),
    )

    def batches(dataset: Dataset | PartedDataset | None, num_samples: int) -> Batches:
        return Batches(
            dataset,
            num_samples=num_samples,
            global_batch_size=run.config.batch.global_batch_size,
            microbatch_size=run.config.batch.microbatch_size,
            replica=run.place.replica,
            g_data=run.place.grid.g_data,
            seed=run.config.seed,
            reads_inputs=run.place.is_first,
            reads_targets=run.place.is_last,
            pinned=pinned,
        )

    training = batches(None if datasets is None else datasets.training, facts["samples"])
    validation = None
    if facts["validation_samples"]:
        dataset = None if datasets is None else datasets.validation
        validation = batches(dataset, facts["validation_samples"])
    unit: Unit = "tokens" if facts["vocab_size"] else "samples"
    return Data(facts["name"], training, validation, unit, facts["fingerprint"])


MEMBERS = ("name", "fingerprint", "vocab_size", "targets_per_sample", "__len__", "count_targets")
"""The members of a `Dataset` that every kind has; each kind also has a method that reads."""


def _open(open_datasets: Callable[[], object], separate: bool) -> Datasets:
    """Open the datasets; DataError if the function returns something else, or datasets that do not
    tell documents apart where `separate` asks for it."""
    opened = open_datasets()
    if not isinstance(opened, Datasets):
        raise DataError(
            f"data: open_datasets returned {type(opened).__name__}; return "
            "Datasets(training, validation)"
        )
    datasets = [opened.training] + ([] if opened.validation is None else [opened.validation])
    for dataset in datasets:
        reads = "start" if isinstance(dataset, PartedDataset) else "read"
        missing = [member for member in (*MEMBERS, reads) if not hasattr(dataset, member)]
        if missing:
            raise DataError(
                f"data: {type(dataset).__name__} has no {', '.join(missing)}; give an ArrayDataset "
                "or a class with the members of axsparse.Dataset"
            )
        if separate and getattr(dataset, "separator", None) is None:
            raise DataError(
                f"data.separate_documents: {dataset.name} has no ends of documents; choose false, "
                "or give a TokenDataset with the separator that ends them"
            )
    return opened


def _facts_of(datasets: Datasets) -> dict[str, Any]:
    """What the other ranks need to know of the data, and what reading ranks compare."""
    training, validation = datasets.training, datasets.validation
    return {
        "host": socket.gethostname(),
        "name": training.name,
        "fingerprint": training.fingerprint,
        "vocab_size": training.vocab_size or 0,
        "samples": len(training),
        "validation_samples": 0 if validation is None else len(validation),
        "validation_fingerprint": "" if validation is None else validation.fingerprint,
    }


def _common_facts(transport: Transport, own: str) -> dict[str, Any]:
    """The facts of the ranks that read data; DataError if two of them differ."""
    # Rank 0 is a first stage, which reads.
    first: dict[str, Any] = json.loads(text_of_first(transport, own))
    differs = bool(own) and {**json.loads(own), "host": first["host"]} != first
    if sum_of(transport, [float(differs)]) == [0.0]:
        return first
    texts = gather_texts(transport.world, transport.backoff, own)
    said = [(rank, json.loads(text)) for rank, text in enumerate(texts) if text]
    for rank, facts in said:
        for key in [key for key in first if key != "host"]:
            if facts[key] != first[key]:
                raise DataError(
                    f"data: {key} is {facts[key]!r} for rank {rank} on host {facts['host']} and "
                    f"{first[key]!r} for rank 0 on host {first['host']}; give all hosts "
                    "the same data, and what is drawn the same seed (torch.manual_seed)"
                )
    return first
