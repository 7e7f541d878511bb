"""Opens the data sets that a configuration names: tokens, the standard library, and blends."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.config.schema import Config, sample_length, token_sources
from axsparse.config.section import counted
from axsparse.data.dataset import Dataset, Datasets, TokenDataset, read_tensors
from axsparse.data.megatron import MegatronIds, is_megatron
from axsparse.data.order import BLOCK, Share, places_of
from axsparse.data.token_file import (
    DISTINCT,
    PREPARE_AGAIN,
    WHERE,
    Split,
    mark_of,
    read_sidecar,
    sample_digest,
    stored,
    token_path,
)
from axsparse.data.tokenizers import BLEND, STDLIB, STDLIB_SEPARATOR, check_tokenizers
from axsparse.data.torch_dataset import reject_no_dataset
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, check_kinds, reading


def open_datasets(config: Config) -> Datasets:
    """The training and validation data of `data.source`.

    Raises ConfigError, DataError or MissingInputError if the data cannot be opened.
    """
    data = config.data
    if data.source == "tokens":
        return _token_datasets(config)
    assert data.source == "stdlib", f"nobody opens {data.source}"
    length, separate = sample_length(config), data.intra_document_attention
    return Datasets(
        stdlib_dataset("train", length, separate=separate),
        stdlib_dataset("validation", length, separate=separate),
    )


def _token_datasets(config: Config) -> Datasets:
    """The tokens of `data.path`, or of all in `data.blend`, and of `data.validation`, else the
    validation parts of all sources."""
    data, asks = config.data, config.train.eval_steps != 0
    where = "data.blend" if data.blend else "data.path"
    # The validation parts that `data.validation` replaces are not opened.
    validates = asks and data.validation is None
    splits: tuple[Split, ...] = ("train", "validation") if validates else ("train",)
    weights = dict(token_sources(data))
    opened = [_tokens_at(config, Path(path), where, splits) for path in weights]
    check_tokenizers(config)
    training: Dataset = opened[0]["train"]
    if data.blend:
        training = Blend([parts["train"] for parts in opened], [*weights.values()])
    if not asks:
        return Datasets(training)
    if data.validation is not None:
        named = _tokens_at(config, Path(data.validation), "data.validation", ("train",))
        return Datasets(training, named["train"])
    held_out = [parts["validation"] for parts in opened if "validation" in parts]
    if not held_out:
        raise ConfigError(
            f"{config.where(where)}: {', '.join(weights)} has no validation part, which "
            "train.eval_steps asks for; prepare it with --validation or --validation-fraction, "
            "name other tokens in data.validation, or set train.eval_steps=0 to train without"
        )
    if len(held_out) == 1:
        return Datasets(training, held_out[0])
    return Datasets(training, Blend(held_out, [1.0] * len(held_out)))


def _tokens_at(
    config: Config, path: Path, where: str, splits: Sequence[Split]
) -> dict[Split, TokenDataset]:
    """The splits that there are of the tokens at a path; files of Megatron are for training."""
    length, separate = sample_length(config), config.data.intra_document_attention
    if not is_megatron(path, where):
        return token_datasets(path, length, splits, separate=separate, where=where)
    ids = MegatronIds(path, where)
    training = TokenDataset(
        name=f"tokens {path.name}",
        fingerprint=ids.fingerprint,
        vocab_size=config.model.vocab_size,
        tokens=ids.tokens,
        sequence_length=length,
        separator=ids.begins() if separate else None,
    )
    return {"train": training}


def token_datasets(
    folder: Path,
    sequence_length: int,
    splits: Sequence[Split] = ("train", "validation"),
    *,
    separate: bool = False,
    where: str = WHERE,
) -> dict[Split, TokenDataset]:
    """The splits of a folder that `axsparse data prepare` wrote, of which validation may be absent.

    The size of each file, and a digest of 64 MiB spread over it, must equal tokens.json's.
    `separate`: samples say where documents begin. `where` names the setting in error messages.
    Raises MissingInputError if a file is missing, DataError if it was changed or is too short,
    ConfigError if documents are to be separated that contain the separator.
    """
    sidecar = read_sidecar(folder, where)
    dtype = stored(sidecar.dtype)
    if separate and sidecar.inner_separators:
        inner = counted(sidecar.inner_separators, "time")
        raise ConfigError(
            f"data.intra_document_attention: true, but {folder} has its separator {inner} within "
            f"documents; {DISTINCT} or choose false"
        )
    sizes = [record.tokens for split, record in sidecar.splits() if split in splits]
    if len(sizes) > 1 and max(sizes) <= sequence_length:
        raise DataError(
            f"data.sequence_length ({folder.name}): {sequence_length}, but there are {sizes[0]} "
            f"tokens of training and {sizes[1]} of validation; bring more of both"
        )
    suggestion = f"copy it again, or {PREPARE_AGAIN}"
    found: dict[Split, TokenDataset] = {}
    for split, record in sidecar.splits():
        if split not in splits:
            continue
        path = token_path(folder, split)
        with reading(f"{where}: {path}", suggestion):
            size, expected = path.stat().st_size, record.tokens * dtype.itemsize
            if size != expected:
                raise DataError(
                    f"{where}: {path} has {size} bytes, tokens.json says {expected}; {suggestion}"
                )
            if sample_digest(path) != record.sample_digest:
                raise DataError(
                    f"{where}: {path} does not have the contents that tokens.json says; copy both "
                    f"again, or {PREPARE_AGAIN}"
                )
            # A memory map: the ranks of a node share the memory.
            tokens = np.memmap(path, dtype=dtype, mode="r")
        found[split] = TokenDataset(
            name=f"{folder.name} {split}",
            fingerprint=record.digest,
            vocab_size=sidecar.largest_id + 1,
            tokens=tokens,
            sequence_length=sequence_length,
            separator=sidecar.separator if separate else None,
            mark=mark_of(dtype) if sidecar.marked else 0,
        )
    return found


class Blend:
    """Data sets that training reads in proportion to their weights: a `Dataset`.

    `weights` has one for each data set, in the same order; only their ratios matter, in steps of a
    ten-thousandth. Of every 10,000 samples that training reads, each data set gives its share, in
    an order that follows from the seed; each begins anew once all of its samples have been read
    (its epoch). An evaluation reads every sample of every data set once, the data sets in turn. A
    blend in a blend counts as its data sets, among which its weight is divided.

    All data sets read as many inputs and targets, of the same shapes. Raises DataError for weights
    that are not above zero, or too small for one sample in 10,000.
    """

    reads_epochs = True

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        check_kinds("blend", locals(), datasets="sequence", weights="sequence")
        for dataset in datasets:
            reject_no_dataset("blend", dataset)
        if not datasets or len(datasets) != len(weights):
            raise DataError(
                f"blend: {len(datasets)} data sets have {len(weights)} weights; give one for each"
            )
        parts = [part for pair in zip(datasets, weights, strict=True) for part in _parts(*pair)]
        datasets, weights = [one for one, _ in parts], [weight for _, weight in parts]
        names = [dataset.name for dataset in datasets]
        for weight in weights:
            check_kinds("blend", {"a weight": weight}, **{"a weight": "number"})
        is_sound = all(0 < weight < float("inf") for weight in weights)
        places = places_of(weights) if is_sound else [0]
        if not all(places):
            raise DataError(
                f"blend: {', '.join(names)} have the weights {list(weights)}, by which not each "
                f"gives a sample in {BLOCK:,}; choose larger ones, or leave data sets out"
            )
        lengths = [len(dataset) for dataset in datasets]
        self.datasets = tuple(datasets)
        self.shares = tuple(map(Share, lengths, places))
        self._ends = np.cumsum(lengths)
        pairs = zip(names, places, strict=True)
        self.name = BLEND + ", ".join(f"{name} {count / BLOCK:.2%}" for name, count in pairs)
        facts = [
            (one.fingerprint, *share) for one, share in zip(datasets, self.shares, strict=True)
        ]
        self.fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
        vocabularies = [dataset.vocab_size or 0 for dataset in datasets]
        self.vocab_size = max(vocabularies) if all(vocabularies) else None
        counts = {dataset.targets_per_sample for dataset in datasets}
        self.targets_per_sample = counts.pop() if len(counts) == 1 else None
        # It matters only whether all data sets say where documents begin.
        separators = [getattr(dataset, "separator", None) for dataset in datasets]
        self.separator = None if any(one is None for one in separators) else separators[0]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs and targets of the samples with these numbers, which go through all data sets;
        DataError if these do not read alike."""
        epochs = np.zeros_like(indices) if epochs is None else epochs
        places, read = [], []
        for dataset, first, here in self._places(indices):
            places.append(here)
            read.append(read_tensors(dataset, indices[here] - first, epochs[here]))
        back = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
        try:
            joined = [torch.cat(parts)[back] for parts in zip(*read, strict=True)]
        except (RuntimeError, ValueError, TypeError) as reason:
            raise DataError(
                f"data ({self.name}): its data sets read inputs or targets of different numbers or "
                "shapes; give data sets that read alike"
            ) from reason
        return tuple(joined[:-1]), joined[-1]

    def count_targets(self, targets: Tensor, samples: NDArray[np.int64] | None = None) -> int:
        """How many targets of a microbatch of these samples count in the loss, each by the rule of
        its data set; without `samples` by the rule of the first one."""
        if samples is None:
            return self.datasets[0].count_targets(targets)
        return sum(
            dataset.count_targets(targets[torch.from_numpy(here)])
            for dataset, _, here in self._places(samples)
        )

    def _places(
        self, samples: NDArray[np.int64]
    ) -> Iterator[tuple[Dataset, int, NDArray[np.int64]]]:
        """Each data set that has any of the samples, the number of its first one, and the places of
        its own among them."""
        for dataset, share, end in zip(self.datasets, self.shares, self._ends, strict=True):
            first = int(end) - share.samples
            here = np.flatnonzero((samples >= first) & (samples < end))
            if here.size:
                yield dataset, first, here


def _parts(dataset: Dataset, weight: float) -> Iterator[tuple[Dataset, float]]:
    """A data set and its weight; of a blend its data sets, among which the weight is divided."""
    if not isinstance(dataset, Blend):
        yield dataset, weight
        return
    for one, share in zip(dataset.datasets, dataset.shares, strict=True):
        yield one, weight * share.places / BLOCK


EXCLUDED_FOLDERS = frozenset(
    # Installed packages and compiled files differ between hosts. Tests are large, and
    # distributions package them separately.
    ("site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "tests", "idle_test")
)


def stdlib_dataset(split: Split, sequence_length: int, *, separate: bool = False) -> TokenDataset:
    """One split of the standard library of the running interpreter; `separate`: samples say where
    documents, which are files, begin."""
    # In a virtual environment the library belongs to the base installation.
    tokens, fingerprint = source_tokens(Path(sysconfig.get_path("stdlib")), split)
    return TokenDataset(
        name=f"{STDLIB} {split}",
        fingerprint=fingerprint,
        vocab_size=256,  # a token is a byte
        tokens=tokens,
        sequence_length=sequence_length,
        separator=STDLIB_SEPARATOR if separate else None,
    )


def source_tokens(root: Path, split: Split) -> tuple[NDArray[np.uint8], str]:
    """All `*.py` files of one split below `root`, each followed by a zero byte.

    Files are sorted by their relative paths. The path of a file alone decides its split, so
    that adding a file moves no other one; about one file in ten is validation. The
    fingerprint covers relative paths and contents.

    Raises DataError if a file or folder cannot be read, MissingInputError if there is no file.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts = []
    for name in _source_files(root):
        path = os.fsencode(name)
        if (zlib.crc32(path) % 10 == 0) != (split == "validation"):
            continue
        try:
            content = (root / name).read_bytes()
        except OSError as error:
            _reject(error)
        digest.update(b"%s\0%d\0%s" % (path, len(content), content))
        parts += [content, bytes([STDLIB_SEPARATOR])]
    if not parts:
        raise MissingInputError(
            f"data.source stdlib: {root} holds no Python source files for {split}; use a Python "
            "whose standard library is installed as plain .py files"
        )
    return np.frombuffer(b"".join(parts), dtype=np.uint8), digest.hexdigest()


def _source_files(root: Path) -> list[str]:
    """Sorted relative POSIX paths of all `*.py` files; linked folders are not entered."""
    names = []
    if root.is_dir():
        for folder, subfolders, files in os.walk(root, onerror=_reject):
            subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
            below = Path(folder).relative_to(root)
            names += [(below / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)


def _reject(error: OSError) -> NoReturn:
    raise DataError(
        f"data.source stdlib: {error.filename} cannot be read ({error.strerror}); "
        "make it readable or repair the Python installation"
    ) from error
