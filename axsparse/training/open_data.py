"""Opens the data on the ranks that read it, and tells its size to all ranks."""

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
from axsparse.runtime.exchange import gather_texts, together
from axsparse.training.resolution import RunSpec


@dataclass(frozen=True)
class Data:
    """One rank's batches, training and validation; without samples on stages in between."""

    name: str
    training: Batches
    validation: Batches | None
    unit: Unit
    """What a target is."""
    fingerprint: str
    """Of the training samples."""


def open_data(
    run: RunSpec,
    loaded: LoadedConfig,
    transport: Transport,
    open_datasets: Callable[[], Datasets],
    *,
    pinned: bool = False,
) -> Data:
    """Open the data on both ends of the pipeline and tell its size to all ranks.

    `pinned` batches stand where a GPU can copy them from without waiting. Raises on all ranks what
    opening raised on any, DataError if two ranks read different data, and what `check_data` raises.
    """
    reads = run.place.is_first or run.place.is_last
    datasets = together(transport, lambda: _opened(open_datasets) if reads else None)
    said = "" if datasets is None else json.dumps(_describe(datasets))
    facts = together(transport, lambda: _common_facts(transport, said))
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
"""Of a `Dataset`, beside what reads."""


def _opened(open_datasets: Callable[[], object]) -> Datasets:
    """What the function opens; DataError if that is no `Datasets`."""
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
    return opened


def _describe(datasets: Datasets) -> dict[str, Any]:
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
    """What the reading ranks say of their data; DataError if two of them differ."""
    texts = gather_texts(transport.world, transport.backoff, own)
    said = [(rank, json.loads(text)) for rank, text in enumerate(texts) if text]
    first: dict[str, Any] = said[0][1]
    for rank, facts in said:
        for key in [key for key in first if key != "host"]:
            if facts[key] != first[key]:
                raise DataError(
                    f"data: {key} is {facts[key]!r} for rank {rank} on host {facts['host']} and "
                    f"{first[key]!r} for rank {said[0][0]} on host {first['host']}; give all hosts "
                    "the same data"
                )
    return first
