"""Tokenizers: bytes, or Hugging Face's `tokenizers` library, an optional dependency."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from axsparse.config.hf_config import read_json
from axsparse.data.token_file import TOKENIZER, TokenizerRecord
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

if TYPE_CHECKING:
    import tokenizers

Tokens = NDArray[np.unsignedinteger[Any]]

SEPARATOR = "<|endoftext|>"
"""The token that is written after each document, unless another is asked for."""
LEAST_BPE = 257
"""The smallest vocabulary of byte-pair encoding: the 256 bytes and the separator."""


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token.

    The byte 255 never occurs in UTF-8, and separates documents. Of every tokenizer the ids of a
    text are the concatenated ids of its pieces, which `documents.pieces` cuts before white space
    that follows a word.
    """

    record = TokenizerRecord(kind="bytes")
    """The entry of the tokenizer in tokens.json."""
    vocab_size = 256
    """All ids are below this number; it also decides how many bytes an id has in a file."""
    separator = 255
    """The id that is written after each document."""
    first = last = np.zeros(0, np.uint8)
    """The ids that begin and that end each text, such as the token BOS; none for most."""

    def encode(self, text: str) -> Tokens:
        """The ids of a text that may continue, (N,) unsigned integers: `first` and the text's."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> Iterable[Tokens]:
        """The ids of each of several pieces, without `first` and `last`."""
        return map(self.encode, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; whatever is no text becomes the replacement character."""
        return bytes(ids).decode(errors="replace")


class Subwords:
    """A tokenizer that Hugging Face's library reads from a file, with the members of bytes.

    It gives a text the ids that `tokenizer(text)` of transformers gives it: special tokens in the
    text are themselves, and the file's own tokens begin and end it.
    """

    def __init__(
        self, path: Path, record: TokenizerRecord, separator: str, given: Path | None = None
    ) -> None:
        """DataError if the file holds no tokenizer, ConfigError if it has no token `separator`;
        they name `given`, the file of the user that `path` is made from."""
        library = import_tokenizers()
        self._path = given or path
        with self._refusing("holds no tokenizer"):
            self._tokenizer = library.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if separator not in vocabulary:
            raise ConfigError(
                f"--separator: {self._path} has no token {separator!r} to put between documents; "
                f"name one that it has{_suggested(self._tokenizer)}"
            )
        self.record = record
        self.separator = vocabulary[separator]
        self.vocab_size = max(vocabulary.values()) + 1
        self.first, self.last = self._around()

    def encode(self, text: str) -> Tokens:
        return np.concatenate([self.first, *self.encode_batch([text])])

    def _around(self) -> tuple[Tokens, Tokens]:
        """The ids that the tokenizer puts before and after a text."""
        with self._refusing("cannot encode a text"):
            encoding = self._tokenizer.encode("a")
        outside = np.array(encoding.special_tokens_mask, dtype=bool)
        ids = np.array(encoding.ids, dtype=np.uint32)
        inner = np.flatnonzero(~outside)
        if not inner.size:
            return ids, ids[:0]
        return ids[: inner[0]], ids[inner[-1] + 1 :]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        # This call alone leaves out the places of the tokens in the text.
        with self._refusing("cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with self._refusing("cannot decode ids"):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """DataError for the library's errors: an Exception, or a panic of Rust, which is none and
        cannot be imported."""
        try:
            yield
        except BaseException as reason:
            if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
                raise
            raise DataError(
                f"--tokenizer: {self._path} {what} ({' '.join(str(reason).split())}); name a "
                "tokenizer.json of Hugging Face's tokenizers library"
            ) from None


Tokenizer = ByteTokenizer | Subwords


def in_folder(path: Path) -> tuple[Path, str | None]:
    """A tokenizer.json and the token that ends a text, of a Hugging Face folder.

    `path` may be the file itself; then the token is None, as where the folder names none.
    MissingInputError if the folder has no tokenizer.json, DataError if its settings are none.
    """
    if not path.is_dir():
        return path, None
    file = path / TOKENIZER
    if not file.is_file():
        raise MissingInputError(
            f"--tokenizer: {path} has no {TOKENIZER}; name a folder that save_pretrained of a "
            "recent transformers wrote"
        )
    beside = path / "tokenizer_config.json"
    end = read_json(beside).get("eos_token") if beside.exists() else None
    name = end.get("content") if isinstance(end, dict) else end
    if not (name is None or isinstance(name, str)):
        raise DataError(f"{beside}: eos_token is {name!r}, not the text of a token; correct it")
    return file, name


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Learn a byte-pair encoding as GPT-2 has it (Radford et al. 2019); returns tokenizer.json.

    It starts from the 256 bytes, and no token reaches from one word into the next. Equal texts
    give equal files, whatever the number of threads.
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
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str(pretty=True)
    return text.encode()


def set_threads(threads: int) -> None:
    """Let the library encode and learn in so many threads of this process.

    It reads the number once: the first call in a process decides.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}


def import_tokenizers() -> Any:
    """Hugging Face's tokenizers library; raises ConfigError if it is not installed."""
    # Processes that fork later would be warned of; only `set_threads` asks for threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "tokenizers other than bytes need Hugging Face's tokenizers library, which is not "
            "installed; pip install 'axsparse[text]', or prepare the data as bytes"
        ) from None
    return tokenizers


def library_version() -> str:
    """Name and version of the library."""
    return f"tokenizers {import_tokenizers().__version__}"


def _suggested(tokenizer: tokenizers.Tokenizer) -> str:
    """The end of an error message: the names of the special tokens of a tokenizer."""
    added = tokenizer.get_added_tokens_decoder().values()
    names = sorted(token.content for token in added if token.special)
    return f", such as {', '.join(map(repr, names[:8]))}" if names else ""
