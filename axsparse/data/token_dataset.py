"""Prepared tokens as data sets: memory-mapped, so that ranks of a node share what they read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from axsparse.data.dataset import TokenDataset
from axsparse.data.token_file import (
    Sidecar,
    Split,
    SplitRecord,
    read_sidecar,
    sample_digest,
    stored,
    token_path,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

WHERE = "data.path"


def token_datasets(
    folder: Path, sequence_length: int, *, validate: bool
) -> tuple[TokenDataset, TokenDataset | None]:
    """Training and validation part of a folder that `axsparse data prepare` wrote.

    The files are compared with what tokens.json says of them: sizes, and a digest of a few
    megabytes spread over each. The validation part is None unless `validate`.

    Raises MissingInputError for files that are not there, DataError for files that are not
    the prepared ones or too short, ConfigError if there is no validation part to `validate` on.
    """
    sidecar = read_sidecar(folder, WHERE)
    training = _open(folder, sidecar, "train", sidecar.train, sequence_length)
    if not validate:
        return training, None
    if sidecar.validation is None:
        raise ConfigError(
            f"{WHERE}: {folder} has no validation part, which train.eval_steps asks for; prepare "
            "it with --validation or --validation-fraction, or set train.eval_steps=0"
        )
    return training, _open(folder, sidecar, "validation", sidecar.validation, sequence_length)


def _open(
    folder: Path, sidecar: Sidecar, split: Split, record: SplitRecord, sequence_length: int
) -> TokenDataset:
    path, dtype = token_path(folder, split), stored(sidecar.dtype)
    try:
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
    except OSError as reason:
        raise MissingInputError(
            f"{WHERE}: {path} cannot be read ({reason.strerror}); copy it again, or prepare the "
            "data again"
        ) from None
    return TokenDataset(
        name=f"tokens {folder.name} {split}",
        fingerprint=record.digest,
        vocab_size=sidecar.vocab_size,
        tokens=tokens,
        sequence_length=sequence_length,
    )
