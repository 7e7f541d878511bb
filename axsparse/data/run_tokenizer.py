"""The tokenizer that a run's data were made with: to continue texts, and as files for transformers.

tokenizer.json           the tokenizer itself
tokenizer_config.json    which of its tokens begins and ends a text, and how long one may be
generation_config.json   the ids of that token
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axsparse.config.schema import token_sources
from axsparse.data.stdlib import SEPARATOR as STDLIB_SEPARATOR
from axsparse.data.stdlib import split_name
from axsparse.data.token_file import SIDECAR, TOKENIZER, WHERE, Sidecar, digest_of, read_sidecar
from axsparse.data.tokenizers import SEPARATOR, ByteTokenizer, Subwords, Tokenizer
from axsparse.runtime.errors import DataError, reading

if TYPE_CHECKING:
    from axsparse.config.schema import DataConfig

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"


def run_tokenizer(data: DataConfig) -> tuple[Tokenizer, int]:
    """The tokenizer, and the token that ends a document in the data; a blend takes both from the
    first source that was prepared.

    Raises MissingInputError if the folder of tokens or its tokenizer cannot be read, DataError if
    the tokenizer is not the one that made the tokens, ConfigError without the library for it.
    """
    if data.source == "stdlib":
        return ByteTokenizer(), STDLIB_SEPARATOR
    folders = [Path(path) for path, _ in token_sources(data)]
    folder = next((path for path in folders if (path / SIDECAR).is_file()), folders[0])
    sidecar = read_sidecar(folder, WHERE)
    if sidecar.tokenizer.kind == "bytes":
        return ByteTokenizer(), sidecar.separator
    path, end = _checked(folder, sidecar)
    return Subwords(path, sidecar.tokenizer, end), sidecar.separator


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer that gives texts the ids of the training data."""

    tokenizer: Mapping[str, Any]
    """The contents of tokenizer.json."""
    end: str
    """The token that follows each document of the training data."""
    end_id: int
    begin: str | None = None
    """The token that begins each document; None if there is none but the end of the one before."""
    begin_id: int | None = None
    split_special_tokens: bool = False
    """Whether special tokens in a text are letters."""

    @property
    def ids(self) -> dict[str, int]:
        """The token ids for config.json and generation_config.json.

        Without a token that begins documents, their end does, as GPT-2 has it: each end of a
        document in the data is followed by the beginning of another.
        """
        begin = self.end_id if self.begin_id is None else self.begin_id
        return {"bos_token_id": begin, "eos_token_id": self.end_id}

    def files(self, length: int) -> dict[str, dict[str, Any]]:
        """The contents of all files, by name; `length` is the longest text of the model."""
        return {
            TOKENIZER: dict(self.tokenizer),
            SETTINGS: {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": self.begin or self.end,
                "eos_token": self.end,
                "model_max_length": length,
                "clean_up_tokenization_spaces": False,
                "split_special_tokens": self.split_special_tokens,
            },
            GENERATION: self.ids,
        }


def exported_tokenizer(data: DataConfig, name: str, fingerprint: str) -> ExportedTokenizer | None:
    """The tokenizer of the training data; None if the run read data of another origin.

    `name` and `fingerprint` belong to the training samples: a run in Python may have custom data,
    of which its configuration says nothing.

    Raises MissingInputError if the folder of tokens is not there, DataError if it is damaged.
    """
    if data.source == "stdlib" and name == split_name("train"):
        return byte_tokenizer(STDLIB_SEPARATOR)
    if data.source != "tokens" or data.path is None:
        return None
    sidecar = read_sidecar(Path(data.path), WHERE)
    if sidecar.train.digest != fingerprint:
        return None
    if sidecar.tokenizer.kind == "bytes":
        return byte_tokenizer(sidecar.separator)
    path, end = _checked(Path(data.path), sidecar)
    bare = {"truncation": None, "padding": None}  # The preparation neither cuts nor fills up.
    made = Subwords(path, sidecar.tokenizer, end)
    begin = made.first.tolist()[:1]
    return ExportedTokenizer(
        json.loads(path.read_bytes()) | bare,
        end,
        sidecar.separator,
        begin=made.decode(begin) if begin else None,
        begin_id=begin[0] if begin else None,
        split_special_tokens=sidecar.tokenizer.split_special_tokens,
    )


def _checked(folder: Path, sidecar: Sidecar) -> tuple[Path, str]:
    """The tokenizer.json of a folder of tokens, which has to have made them, and the token after
    each document."""
    path = folder / TOKENIZER
    with reading(f"{WHERE}: {path}", "copy it again, or prepare the data again"):
        digest = digest_of(path)
    if digest != sidecar.tokenizer.digest:
        raise DataError(
            f"{WHERE}: {path} is not the tokenizer that made the tokens; copy it again, or prepare "
            "the data again"
        )
    return path, str(sidecar.settings.get("separator", SEPARATOR))


def byte_tokenizer(separator: int) -> ExportedTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8; the id `separator`, 0 … 255, ends a text.

    Texts that hold the byte `separator` itself lose it; texts of the training data do not.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_letters()) if byte != separator}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": separator,
                "content": SEPARATOR,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": True,
            }
        ],
        "pre_tokenizer": {**by_bytes, "use_regex": True},
        "decoder": {**by_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {**vocabulary, SEPARATOR: separator},
            "merges": [],
        },
    }
    return ExportedTokenizer(tokenizer, SEPARATOR, separator)


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level encodings (Radford et al. 2019).

    Bytes that Latin-1 prints stand for themselves; the others, in order, for U+0100 and on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
