"""What turns text into token ids: its bytes, or Hugging Face's `tokenizers`, which is an extra."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from axsparse.data.prepare.whole_files import digest_of, new_file
from axsparse.data.token_file import TokenizerRecord
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

if TYPE_CHECKING:
    import tokenizers

Tokens = NDArray[np.unsignedinteger[Any]]

SEPARATOR = "<|endoftext|>"
"""The token between documents, unless a tokenizer has another."""
LEAST_BPE = 257
"""All bytes and the separator: the smallest vocabulary of byte-pair encoding."""
PIECE = 1 << 16
"""Letters that are tokenized together: they cost about a hundred times their size in memory."""
SLACK = 1 << 13
"""Letters beyond a piece in which a place to cut is looked for."""
_CUT = re.compile(r"\S(?=[ \t\r\n])")


class Tokenizer(Protocol):
    """Text to token ids, and what a reader has to know of them."""

    record: TokenizerRecord
    vocab_size: int
    """Ids are below it."""
    separator: int
    """Follows each document, and stands for nothing inside one."""

    def encode(self, text: str) -> Tokens:
        """The ids of a text, without separator."""
        ...


class ByteTokenizer:
    """A token is a byte of UTF-8, which never has the byte 255: that separates documents."""

    record = TokenizerRecord(kind="bytes")
    vocab_size = 256
    separator = 255

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class Subwords:
    """A tokenizer of Hugging Face's library, from its file."""

    def __init__(self, path: Path, record: TokenizerRecord, separator: str) -> None:
        """Raises DataError for a file that holds no tokenizer, ConfigError without `separator`."""
        library = import_tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as reason:  # the library raises nothing narrower
            raise DataError(
                f"--tokenizer: {path} holds no tokenizer ({' '.join(str(reason).split())}); name "
                "a tokenizer.json of Hugging Face's tokenizers library"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A separator that a document mentions is text like any other.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if separator not in vocabulary:
            raise ConfigError(
                f"--separator: {path} has no token {separator!r} to put between documents; name "
                f"one that it has{_suggested(self._tokenizer)}"
            )
        self.record = record
        self.separator = vocabulary[separator]
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, text: str) -> Tokens:
        ids = [self._encode(piece) for piece in pieces(text)]
        return np.concatenate(ids) if ids else np.empty(0, np.uint32)

    def _encode(self, piece: str) -> Tokens:
        # The batch call is the one that does not trace where each token came from.
        (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about `PIECE` letters, cut before white space that follows a word.

    No token of GPT-2's kind of byte-pair encoding reaches across such a place, so that
    pieces have the tokens of the whole. Without one near enough, the cut is where it falls.
    """
    begin = 0
    while len(text) - begin > PIECE + SLACK:
        end = begin + PIECE
        found = _CUT.search(text, end - 1, end + SLACK)
        end = found.end() if found else end
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


@lru_cache(maxsize=1)
def open_tokenizer(path: Path | None, record: TokenizerRecord, separator: str) -> Tokenizer:
    """The tokenizer of a file, or bytes without one; the last one opened is kept."""
    return ByteTokenizer() if path is None else Subwords(path, record, separator)


def describe(path: Path, kind: str) -> TokenizerRecord:
    """The record of a tokenizer's file."""
    return TokenizerRecord.model_validate(
        {"kind": kind, "digest": digest_of(path), "library": library_version()}
    )


def check_readable(path: Path) -> None:
    """MissingInputError if a tokenizer's file is not there."""
    try:
        path.open("rb").close()
    except OSError as reason:
        raise MissingInputError(
            f"--tokenizer: {path} cannot be read ({reason.strerror}); name a tokenizer.json"
        ) from None


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn byte-pair encoding (GPT-2's kind: bytes first, words apart) and write its file.

    Equal texts give equal files, whatever the number of threads.
    """
    library = import_tokenizers()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    with new_file(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode())


def import_tokenizers() -> Any:
    """The library, or ConfigError where it is missing."""
    # Processes are the parallelism, as ranks are elsewhere; training asks for threads itself.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "--train-bpe, --tokenizer: they need Hugging Face's tokenizers library, which is not "
            "installed; pip install 'axsparse[text]', or leave both out for bytes"
        ) from None
    return tokenizers


def library_version() -> str:
    """Name and version of the library."""
    return f"tokenizers {import_tokenizers().__version__}"


def _suggested(tokenizer: tokenizers.Tokenizer) -> str:
    """The special tokens there are, in words."""
    added = tokenizer.get_added_tokens_decoder().values()
    names = sorted(token.content for token in added if token.special)
    return f", such as {', '.join(map(repr, names[:8]))}" if names else ""
