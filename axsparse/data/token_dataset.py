"""Opens prepared tokens as data sets, memory-mapped, so that the ranks of a node share memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from axsparse.data.dataset import TokenDataset
from axsparse.data.token_file import (
    Sidecar,
    Split,
    read_sidecar,
    sample_digest,
    stored,
    token_path,
)
from axsparse.runtime.errors import ConfigError, DataError, reading

WHERE = "data.path"


def token_datasets(
    folder: Path, sequence_length: int, *, validate: bool, separate: bool = False
) -> tuple[TokenDataset, TokenDataset | None]:
    """The training and the validation part of a folder that `axsparse data prepare` wrote.

    The size of each file, and a digest of 4 MiB spread over it, must be those of tokens.json.
    The validation part is None unless `validate`. `separate`: samples say where documents begin.

    Raises MissingInputError if a file is missing, DataError if it was changed or is too short,
    ConfigError if `validate` is set and there is no validation part.
    """
    sidecar = read_sidecar(folder, WHERE)
    separator = sidecar.separator if separate else None
    training = _open(folder, sidecar, "train", sequence_length, separator)
    if not validate:
        return training, None
    if sidecar.validation is None:
        raise ConfigError(
            f"{WHERE}: {folder} has no validation part, which train.eval_steps asks for; prepare "
            "it with --validation or --validation-fraction, or set train.eval_steps=0"
        )
    return training, _open(folder, sidecar, "validation", sequence_length, separator)


def _open(
    folder: Path, sidecar: Sidecar, split: Split, sequence_length: int, separator: int | None
) -> TokenDataset:
    path, dtype = token_path(folder, split), stored(sidecar.dtype)
    record = dict(sidecar.splits())[split]
    with reading(f"{WHERE}: {path}", "copy it again, or prepare the data again"):
        size = path.stat().st_size
        expected = record.tokens * dtype.itemsize
        if size != expected:
            raise DataError(
                f"{WHERE}: {path} has {size} bytes, tokens.json says {expected}; copy it again, or "
                "prepare the data again"
            )
        if sample_digest(path) != record.sample_digest:
            raise DataError(
                f"{WHERE}: {path} does not have the contents that tokens.json says; copy both "
                "again, or prepare the data again"
            )
        tokens = np.memmap(path, dtype=dtype, mode="r")
    return TokenDataset(
        name=f"tokens {folder.name} {split}",
        fingerprint=record.digest,
        vocab_size=sidecar.vocab_size,
        tokens=tokens,
        sequence_length=sequence_length,
        separator=separator,
    )
