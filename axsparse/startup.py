"""What ranks compare before a run: versions, configuration, data; and the run directory."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import axsparse
from axsparse.comm import Transport
from axsparse.config.load import Loaded, to_yaml
from axsparse.config.schema import Config
from axsparse.config.validate import check_data
from axsparse.data.batches import Batches
from axsparse.data.dataset import Dataset, PartedDataset
from axsparse.data_parallel.agreement import gather_texts
from axsparse.errors import ConfigError, DataError, OutputError
from axsparse.job import together
from axsparse.models.survey import Survey
from axsparse.observe.console import Unit
from axsparse.observe.memory import host_memory_bytes, resident_memory_bytes
from axsparse.placing import Room
from axsparse.resolve import Resolved

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"


def versions() -> dict[str, str]:
    """What a run's numbers may depend on."""
    return {
        "axsparse": axsparse.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def facts_of(config: Config, survey: Survey) -> dict[str, str]:
    """What must be equal on all ranks: every version, every setting, every layer."""
    settings = {
        f"{section}.{key}" if isinstance(values, dict) else section: str(value)
        for section, values in config.model_dump().items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
    layers = {f"layer {layer.name}": repr(layer.parameters) for layer in survey.layers}
    return {
        **versions(),
        **settings,
        **layers,
        "ties": repr(survey.ties),
        "start values": survey.start or "drawn from the seed",
    }


def refuse_odd_rank(transport: Transport, facts: Mapping[str, str]) -> None:
    """ConfigError if a fact differs between ranks; names the odd rank and its host."""
    own = json.dumps({"host": socket.gethostname(), **facts})
    # Facts of a large model are 40 kB, so that all ranks' are only gathered to name the odd one.
    digest = hashlib.sha256(json.dumps(dict(facts)).encode()).hexdigest()
    if len(set(gather_texts(transport.world, transport.backoff, digest))) == 1:
        return
    everyone = [json.loads(text) for text in gather_texts(transport.world, transport.backoff, own)]
    for fact in facts:
        values = Counter(rank.get(fact, "nothing") for rank in everyone)
        common = values.most_common(1)[0][0]
        for number, rank in enumerate(everyone):
            if (has := rank.get(fact, "nothing")) != common:
                raise ConfigError(
                    f"{fact}: rank {number} on host {rank['host']} has {_short(has)}, the "
                    f"others have {_short(common)}; start all ranks with the same command, "
                    "configuration and environment"
                )


@dataclass(frozen=True)
class Datasets:
    """What is read, opened on the ranks that read only: an `ArrayDataset` or `TokenDataset`, or a
    class of one's own with the members of `Dataset`."""

    training: Dataset | PartedDataset
    validation: Dataset | PartedDataset | None = None


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
    run: Resolved,
    loaded: Loaded,
    transport: Transport,
    open_datasets: Callable[[], Datasets],
    *,
    words: int | None = None,
    pinned: bool = False,
) -> Data:
    """Open the data on both ends of the pipeline and tell its size to all ranks.

    `words`: those that the model knows, if it says so. `pinned`: batches stand where a GPU can
    copy them from without waiting.
    Raises on all ranks what opening raised on any, DataError if two ranks read different
    data, and what the rules of `check_data` raise.
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
            words=words,
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


def make_run_dir(loaded: Loaded) -> Path:
    """Create the run directory; OutputError if it cannot be written or holds another run."""
    wanted = loaded.config.run_dir
    where = loaded.where("run_dir")
    if wanted != "auto":
        return _claim(Path(wanted), where)
    for number in itertools.count(1):
        path = Path("runs") / (loaded.name if number == 1 else f"{loaded.name}-{number}")
        try:
            return _claim(path, where)
        except _TakenError:
            continue
    raise AssertionError("numbers do not end")


class _TakenError(OutputError):
    """Another run has this directory."""


def _claim(path: Path, where: str) -> Path:
    """Make the directory and, in one indivisible step, the file that says whose it is."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / METRICS_FILE).open("x").close()
    except FileExistsError as reason:
        if not path.is_dir():
            raise OutputError(
                f"{where}: {path} is not a directory; choose another --run-dir"
            ) from reason
        raise _TakenError(
            f"{where}: {path} holds another run's {METRICS_FILE}, which would be mixed up; "
            "choose another --run-dir, or go on with that run by --resume auto"
        ) from reason
    except OSError as reason:
        raise OutputError(
            f"{where}: {path} cannot be written ({reason.strerror}); choose another --run-dir"
        ) from reason
    return path


def save_config(config: Config, run_dir: Path) -> None:
    """Write the resolved configuration, headed by versions and git hash."""
    head = [f"{name} {version}" for name, version in versions().items()]
    head.append(f"git {git_hash() or 'unknown'}")
    text = "".join(f"# {line}\n" for line in head) + to_yaml(config)
    try:
        (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    except OSError as reason:
        raise OutputError(
            f"{run_dir / CONFIG_FILE}: cannot be written ({reason.strerror}); "
            "choose another --run-dir"
        ) from reason


def git_hash() -> str | None:
    """The commit of the checkout that axsparse runs from; None for an installed package."""
    root = Path(axsparse.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def found_memory(config: Config, transport: Transport, room: Room | None = None) -> float | None:
    """Bytes that every host, or every GPU, leaves to each of its ranks, the least of all; None if
    it decides nothing. `room` is that of this rank's GPU."""
    layout = config.layout
    if layout.g_inter != "auto" or layout.memory_per_rank != "auto":
        return None
    if room is None:
        own = f"{host_memory_bytes()} {resident_memory_bytes()} {socket.gethostname()}"
    else:
        own = f"{room.nbytes} 0 {room.where}"
    texts = gather_texts(transport.world, transport.backoff, own)
    hosts = [text.split(maxsplit=2) for text in texts]
    ranks = Counter(host for _, _, host in hosts)
    return min(int(memory) / ranks[host] - int(held) for memory, held, host in hosts)
