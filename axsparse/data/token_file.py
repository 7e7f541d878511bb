"""The files of a folder of prepared tokens, and the contents of its tokens.json.

    <folder>/train.tokens        token ids, little-endian, nothing else
    <folder>/validation.tokens   the same, if there is a validation part
    <folder>/tokenizer.json      turns ids into text again; absent where tokens are bytes
    <folder>/tokens.json         describes the other files; written last

Each document is followed by one `separator`, an id that a document contains only where a chat
template or the text itself writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from axsparse.runtime.errors import DataError, reading

SIDECAR = "tokens.json"
TOKENIZER = "tokenizer.json"
FORMAT: Literal[1] = 1
"""Version of the format; raised when files of an older version can no longer be read."""

Split = Literal["train", "validation"]
DtypeName = Literal["uint8", "uint16", "uint32"]

WHERE = "data.path"
DISTINCT = "prepare with --separator TOKEN, one that no document contains,"
PREPARE_AGAIN = "prepare the data again in another folder"
SAMPLED_BLOCKS, SAMPLED_BYTES = 1024, 1 << 16
"""Blocks of a file that are compared at the start of a run, evenly spread: at most 64 MiB."""


class Record(BaseModel):
    """Base class of records that are stored as JSON: frozen, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenizerRecord(Record):
    """The tokenizer that was applied to the text."""

    kind: Literal["bytes", "bpe", "file"]
    """`bpe` was learnt from this text; `file` is a tokenizer.json that the user gave."""
    digest: str = ""
    """BLAKE2b-128 of tokenizer.json; empty for bytes."""
    library: str = ""
    """Name and version of the library that applied the tokenizer; empty for bytes."""
    split_special_tokens: bool = False
    """Whether special tokens in a text are letters, as a setting of transformers has it."""


class SplitRecord(Record):
    """One file of tokens, separators included."""

    documents: PositiveInt
    tokens: PositiveInt
    digest: str
    """BLAKE2b-128 of the file."""
    sample_digest: str
    """`sample_digest` of the file: to compare it, 64 MiB are read at most."""


class SourceCounts(Record):
    """The text that the tokens were made from."""

    files: PositiveInt
    bytes: NonNegativeInt
    left_out: dict[str, NonNegativeInt]
    """Number of documents left out, by reason."""
    examples: tuple[str, ...]
    """The first of these: file, line at which the document begins, reason."""


class Sidecar(Record):
    """The contents of tokens.json."""

    format: Literal["axsparse tokens"] = "axsparse tokens"
    version: Literal[1]
    axsparse: str
    """The version of axsparse that wrote the files."""
    tokenizer: TokenizerRecord
    vocab_size: PositiveInt
    """All ids of the tokenizer are below this number."""
    largest_id: NonNegativeInt
    """The largest id in the files."""
    separator: NonNegativeInt
    """The id that follows each document."""
    inner_separators: NonNegativeInt = 0
    """How often it is within documents, which it then does not tell apart."""
    dtype: DtypeName
    marked: bool = False
    """Whether the highest bit of an id says that the token is no target: all words of a chat but
    the assistant's."""
    chat_template: str | dict[str, str] = ""
    """The template that chats were put together by, or several by name."""
    chat_ends: tuple[NonNegativeInt, ...] = ()
    """The ids that end an answer in a chat."""
    train: SplitRecord
    validation: SplitRecord | None
    sources: SourceCounts
    settings: dict[str, str | int | float | bool]
    """Settings of the preparation that the tokens depend on."""
    request: str
    """Key of the request: a digest of the settings and of paths, sizes and times of the sources."""

    def splits(self) -> Iterator[tuple[Split, SplitRecord]]:
        yield "train", self.train
        if self.validation is not None:
            yield "validation", self.validation


def token_path(folder: Path, split: Split) -> Path:
    return folder / f"{split}.tokens"


def dtype_for(vocab_size: int, *, marked: bool = False) -> DtypeName:
    """The smallest type that holds every id below `vocab_size`, and the mark of marked ids."""
    vocab_size <<= marked
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


def stored(dtype: DtypeName) -> np.dtype[np.unsignedinteger]:
    """The numpy type of ids in a file: little-endian on every machine."""
    little_endian: np.dtype[np.unsignedinteger] = np.dtype(dtype).newbyteorder("<")
    return little_endian


def mark_of(dtype: np.dtype[np.unsignedinteger[Any]]) -> int:
    """The bit of ids of this type that says that a token is no target."""
    return 1 << (8 * dtype.itemsize - 1)


def id_facts(
    path: Path, dtype: np.dtype[np.unsignedinteger[Any]], mark: int, separator: int
) -> tuple[int, int]:
    """The largest id in a file of tokens, of which `mark` is no part, and how many of them are the
    separator."""
    tokens = np.memmap(path, dtype, "r")
    largest = found = 0
    for first in range(0, tokens.size, 1 << 20):
        ids = tokens[first : first + (1 << 20)] & ~dtype.type(mark)
        largest, found = max(largest, int(ids.max())), found + int((ids == separator).sum())
    return largest, found


def digest_of(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sampled(size: int, block: int) -> list[int]:
    """The beginnings of blocks, evenly spread over `size`, the first and the last among them; up to
    `SAMPLED_BLOCKS` of them cover it all."""
    count = min(SAMPLED_BLOCKS, -(-size // block))
    return [max(0, size - block) * number // max(1, count - 1) for number in range(count)]


def sample_digest(path: Path) -> str:
    """BLAKE2b-128 of a file's size and of `SAMPLED_BLOCKS` evenly spread blocks."""
    size = path.stat().st_size
    digest = hashlib.blake2b(b"%d" % size, digest_size=16)
    with path.open("rb") as file:
        for begin in sampled(size, SAMPLED_BYTES):
            file.seek(begin)
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def read_sidecar(folder: Path, where: str) -> Sidecar:
    """The tokens.json of a folder; `where` names the setting in error messages.

    Raises MissingInputError if it cannot be read, DataError if it is none of this version.
    """
    path = folder / SIDECAR
    with reading(f"{where}: {path}", "name a folder that `axsparse data prepare` has finished"):
        text = path.read_bytes()
    try:
        return Sidecar.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise DataError(
            f"{where}: {path} does not describe tokens ({place}: {first['msg']}); {PREPARE_AGAIN}"
        ) from None
