"""Opens the data sets that a configuration names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from axsparse.config.schema import Config, sample_length, token_sources
from axsparse.data.blend import Blend
from axsparse.data.dataset import Dataset, Datasets, TokenDataset
from axsparse.data.in_place import InPlace, in_place
from axsparse.data.stdlib import stdlib_dataset
from axsparse.data.token_file import (
    WHERE,
    Split,
    SplitRecord,
    check_of_sizes,
    mark_of,
    read_sidecar,
    sample_digest,
    stored,
    token_path,
)
from axsparse.runtime.errors import ConfigError, DataError, reading


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
    """The tokens of `data.path`, or of all paths of `data.blend`.

    The validation data are `data.validation`, else the validation parts of all sources.
    """
    data, asks = config.data, config.train.eval_steps != 0
    where = "data.blend" if data.blend else "data.path"
    # The validation parts that `data.validation` replaces are not opened.
    validates = asks and data.validation is None
    weights = dict(token_sources(data))
    opened = [_tokens_at(config, Path(path), where, validate=validates) for path in weights]
    training: Dataset = opened[0][0]
    held_out = [held for _, held in opened if held is not None]
    if data.blend:
        training = Blend([part for part, _ in opened], [*weights.values()])
    if not asks:
        return Datasets(training)
    if data.validation is not None:
        at = Path(data.validation)
        return Datasets(training, _tokens_at(config, at, "data.validation", validate=False)[0])
    if not held_out:
        raise ConfigError(
            f"{config.where(where)}: {', '.join(weights)} has no validation part, which "
            "train.eval_steps asks for; prepare it with --validation or --validation-fraction, "
            "name other tokens in data.validation, or set train.eval_steps=0"
        )
    if len(held_out) == 1:
        return Datasets(training, held_out[0])
    return Datasets(training, Blend(held_out, [1.0] * len(held_out)))


def _tokens_at(
    config: Config, path: Path, where: str, *, validate: bool
) -> tuple[TokenDataset, TokenDataset | None]:
    """The training and the validation tokens at a path; the latter are None unless `validate`, and
    if there are none."""
    length, separate = sample_length(config), config.data.intra_document_attention
    found = in_place(path, where)
    if found is None:
        return token_datasets(path, length, validate=validate, separate=separate, where=where)
    vocabulary = config.model.vocab_size

    def dataset(ids: InPlace, name: str) -> TokenDataset:
        separator = ids.begins() if separate else None
        facts = (f"tokens {path.name}{name}", ids.fingerprint, vocabulary)
        return TokenDataset(*facts, ids.tokens, length, separator, check=check_of_sizes(ids.files))

    training, held_out = found
    if held_out is None or not validate:
        return dataset(training, ""), None
    return dataset(training, " train"), dataset(held_out, " validation")


def token_datasets(
    folder: Path,
    sequence_length: int,
    *,
    validate: bool,
    separate: bool = False,
    where: str = WHERE,
) -> tuple[TokenDataset, TokenDataset | None]:
    """The training and the validation part of a folder that `axsparse data prepare` wrote.

    The size of each file, and a digest of 64 MiB spread over it, must equal tokens.json's. The
    validation part is None unless `validate`, and if there is none. `separate`: samples say where
    documents begin. `where` names the setting in error messages.

    Raises MissingInputError if a file is missing, DataError if it was changed or is too short.
    """
    sidecar = read_sidecar(folder, where)
    dtype = stored(sidecar.dtype)
    suggestion = "copy it again, or prepare the data again"

    def opened(split: Split, record: SplitRecord) -> TokenDataset:
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
                    "again, or prepare the data again"
                )
            # A memory map: the ranks of a node share the memory.
            tokens = np.memmap(path, dtype=dtype, mode="r")
        return TokenDataset(
            name=f"tokens {folder.name} {split}",
            fingerprint=record.digest,
            vocab_size=sidecar.largest_id + 1,
            tokens=tokens,
            sequence_length=sequence_length,
            separator=sidecar.separator if separate else None,
            mark=mark_of(dtype) if sidecar.marked else 0,
            check=check_of_sizes([path]),
        )

    held_out = sidecar.validation if validate else None
    training = opened("train", sidecar.train)
    return training, None if held_out is None else opened("validation", held_out)
