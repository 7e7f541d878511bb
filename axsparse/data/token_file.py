"""How prepared tokens lie on the disk: a file of token ids a split, and tokens.json beside them.

    <folder>/train.tokens        token ids, little-endian, nothing else
    <folder>/validation.tokens   likewise, if there is a validation part
    <folder>/tokenizer.json      what turns ids into text again; not for bytes
    <folder>/tokens.json         what the others hold; written last

A document is followed by one `separator`, which no document contains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from axsparse.runtime.errors import DataError, MissingInputError

SIDECAR = "tokens.json"
TOKENIZER = "tokenizer.json"
FORMAT = 1
"""Raised whenever files of an older form can no longer be read."""

Split = Literal["train", "validation"]
DtypeName = Literal["uint8", "uint16", "uint32"]

_STORED: dict[DtypeName, np.dtype[np.unsignedinteger]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 1 << 16
"""How much of a file is compared at the start of a run: at most 4 MiB, evenly spread."""


class Record(BaseModel):
    """Base of what is kept as JSON: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenizerRecord(Record):
    """What made tokens of the text."""

    kind: Literal["bytes", "bpe", "file"]
    """`bpe` was trained on this text, `file` was given."""
    digest: str = ""
    """BLAKE2b-128 of tokenizer.json; empty for bytes."""
    library: str = ""
    """Library and version that applied it."""


class SplitRecord(Record):
    """One file of tokens."""

    documents: PositiveInt
    tokens: PositiveInt
    """Separators included."""
    digest: str
    """BLAKE2b-128 of the file."""
    sample_digest: str
    """`sample_digest` of the file, which costs a few megabytes to compare."""


class SourceCounts(Record):
    """What the text came from."""

    files: PositiveInt
    bytes: NonNegativeInt
    left_out: dict[str, NonNegativeInt]
    """Documents left out, by reason."""
    examples: tuple[str, ...]
    """The first of them: file, byte at which the document begins, reason."""


class Sidecar(Record):
    """The contents of tokens.json."""

    format: Literal["axsparse tokens"] = "axsparse tokens"
    version: PositiveInt
    axsparse: str
    """Version that wrote it."""
    tokenizer: TokenizerRecord
    vocab_size: PositiveInt
    """Ids are below it."""
    separator: NonNegativeInt
    """Id that follows each document."""
    dtype: DtypeName
    train: SplitRecord
    validation: SplitRecord | None
    sources: SourceCounts
    settings: dict[str, str | int | float | bool]
    """Settings of the preparation that the tokens depend on."""
    request: str
    """Digest of settings and of paths, sizes and times of the sources."""

    def splits(self) -> Iterator[tuple[Split, SplitRecord]]:
        """The files of tokens there are."""
        yield "train", self.train
        if self.validation is not None:
            yield "validation", self.validation


def token_path(folder: Path, split: Split) -> Path:
    """The file of one split."""
    return folder / f"{split}.tokens"


def dtype_for(vocab_size: int) -> DtypeName:
    """The smallest type that holds every id."""
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


def stored(dtype: DtypeName) -> np.dtype[np.unsignedinteger]:
    """The type as it lies on the disk, little-endian on every machine."""
    return _STORED[dtype]


def sample_digest(path: Path) -> str:
    """BLAKE2b-128 of a file's size and of `SAMPLED_BLOCKS` blocks, first and last included."""
    size = path.stat().st_size
    digest = hashlib.blake2b(b"%d" % size, digest_size=16)
    last = max(0, size - SAMPLED_BYTES)
    with path.open("rb") as file:
        for number in range(SAMPLED_BLOCKS):
            file.seek(last * number // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def read_sidecar(folder: Path, where: str) -> Sidecar:
    """What a folder of prepared tokens holds; `where` names who asks in messages.

    Raises MissingInputError if it has no readable tokens.json, DataError if that is not ours.
    """
    path = folder / SIDECAR
    try:
        text = path.read_bytes()
    except OSError as reason:
        raise MissingInputError(
            f"{where}: {path} cannot be read ({reason.strerror}); name a folder that "
            "`axsparse data prepare` has finished"
        ) from None
    try:
        version = _Head.model_validate_json(text).version
        if version != FORMAT:
            raise DataError(
                f"{where}: {path} has version {version}, this axsparse reads {FORMAT}; prepare "
                "the data again, or use the axsparse that did"
            )
        return Sidecar.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise DataError(
            f"{where}: {path} does not describe tokens ({place}: {first['msg']}); prepare the "
            "data again"
        ) from None


class _Head(BaseModel):
    """What every version has; the rest may differ."""

    format: Literal["axsparse tokens"]
    version: int
