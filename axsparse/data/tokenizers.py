"""Tokenizers: bytes, or Hugging Face's `tokenizers` library, an optional dependency.

A run's tokenizer continues texts, and is exported as files for transformers:

    tokenizer.json           the tokenizer itself
    tokenizer_config.json    which of its tokens begins and ends a text, and how long one may be
    generation_config.json   the ids of that token, and of those that end an answer
    chat_template.jinja      the template of the chats in the data; others have a folder
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from axsparse.config.schema import token_sources
from axsparse.data.token_file import (
    PREPARE_AGAIN,
    SIDECAR,
    TOKENIZER,
    WHERE,
    TokenizerRecord,
    digest_of,
    read_sidecar,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, printable, reading

if TYPE_CHECKING:
    from axsparse.config.schema import Config, DataConfig


Tokens = NDArray[np.unsignedinteger[Any]]

STDLIB_SEPARATOR = 0
"""Follows each file of the standard library; no source file contains it."""
SEPARATOR = "<|endoftext|>"
"""The token that is written after each document, unless another is asked for."""
LEAST_BPE = 257
"""The smallest vocabulary of byte-pair encoding: the 256 bytes and the separator."""
JINJA, MORE_JINJA = "chat_template.jinja", "additional_chat_templates"
"""The file of a chat template, and the folder of others, as transformers names them."""
SETTINGS_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
    JINJA,
)
"""Files next to a tokenizer.json from which transformers takes settings of its tokenizer."""
ANOTHER_TOKENIZER = (
    f"name a {TOKENIZER} of Hugging Face's tokenizers library, or a folder that save_pretrained "
    "wrote"
)
PROBE = "The cat's  12,345\n\n  \u00c9te\u0301 \ufb01\t "
"""A text whose ids say, with special tokens after it, whether two tokenizers are the same."""
OVERLAP = 1 << 11
"""Characters that a window of a long text shares with the one before."""
LEAST_SHARED = 8
"""The fewest ids of these characters at which two windows are joined."""


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token.

    The byte 255 never occurs in UTF-8, and separates documents.
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
        """The ids of a text that may continue: `first` and the text's."""
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
        with _refusing(self._path, "holds no tokenizer"):
            self._tokenizer = library.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = record.split_special_tokens
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if separator not in vocabulary:
            added = self._tokenizer.get_added_tokens_decoder().values()
            names = sorted(repr(token.content) for token in added if token.special)[:8]
            such = f", such as {', '.join(names)}" if names else ""
            raise ConfigError(
                f"--separator: {self._path} has no token {separator!r} to put between documents; "
                f"name one that it has{such}"
            )
        self.record = record
        self.separator = vocabulary[separator]
        self.vocab_size = max(vocabulary.values()) + 1
        self.first, self.last = self._around_texts(sorted(vocabulary.values()))

    def _around_texts(self, ids: Sequence[int]) -> tuple[Tokens, Tokens]:
        """The ids that begin and that end a text. Words without a token of theirs have no place
        between them: another word of the vocabulary, of these ids, shows it then."""
        for word in chain("a", (self.decode([id_]) for id_ in ids)):
            with _refusing(self._path, "cannot encode a text"):
                encoding = self._tokenizer.encode(word)
            found = np.array(encoding.ids, dtype=np.uint32)
            inner = np.flatnonzero(~np.array(encoding.special_tokens_mask, dtype=bool))
            if inner.size:
                return found[: inner[0]], found[inner[-1] + 1 :]
        return found, found[:0]

    def encode(self, text: str) -> Tokens:
        return np.concatenate([self.first, *self.encode_batch([text])])

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        # This call alone leaves out the places of the tokens in the text.
        with _refusing(self._path, "cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with _refusing(self._path, "cannot decode ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


Tokenizer = ByteTokenizer | Subwords


class LongText:
    """Encodes a text that is too long to be encoded at once.

    Pieces of it are encoded in windows, each with the last `OVERLAP` characters before it. These
    are encoded alone as well: two windows are joined in their middle where the first has the same
    ids from a quarter of them on, and the second up to three quarters. Else both are encoded as
    one, which gives the whole text its ids.
    """

    def __init__(self, tokenizer: Subwords) -> None:
        self._tokenizer = tokenizer
        self._text, self._later = "", ""
        """The last window, and the pieces that are still to be encoded with it."""
        self._ids, self._given = np.zeros(0, np.uint32), 0
        """The ids of the window, and how many of them were given out."""

    @property
    def tail(self) -> str:
        """The characters with which the window of the next piece begins."""
        return (self._text + self._later)[-OVERLAP:]

    def add(self, piece: str, tail_ids: Tokens, ids: Tokens) -> Tokens:
        """The ids that the text is sure to have next; `ids` encode `tail` and the piece."""
        shared, first = tail_ids.size, self._ids.size - tail_ids.size
        begin, end = shared // 4, shared - shared // 4
        agree = (
            not self._later
            and shared >= LEAST_SHARED
            and first + begin >= self._given
            and np.array_equal(self._ids[first + begin :], tail_ids[begin:])
            and np.array_equal(ids[:end], tail_ids[:end])
        )
        if not agree:
            self._later += piece
            if len(self._later) >= len(self._text):  # Encoding again takes twice the time at most.
                self._merge()
            return self._ids[:0]
        sure = self._ids[self._given : first + shared // 2]
        self._text, self._ids, self._given = self.tail + piece, ids, shared // 2
        return sure

    def end(self) -> Tokens:
        if self._later:
            self._merge()
        return self._ids[self._given :]

    def _merge(self) -> None:
        self._text, self._later = self._text + self._later, ""
        (self._ids,) = self._tokenizer.encode_batch([self._text])


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer that the user names: `AutoTokenizer.from_pretrained` of transformers reads it."""

    folder: Path
    json: bytes
    """Its tokenizer.json, with what the settings next to the file change."""
    end: str | None = None
    """The token that ends a text, if there is one."""
    split_special_tokens: bool = False
    """Whether special tokens in a text are letters."""
    loaded: Any = None
    """The tokenizer of transformers; None if the file has nothing next to it that it would read."""


def given_tokenizer(path: Path) -> GivenTokenizer:
    """The tokenizer of a folder, or of a tokenizer.json with the settings next to it.

    MissingInputError if nothing is there, DataError if transformers cannot read it or adds code of
    its own to what a tokenizer.json says, ConfigError if it is needed and not installed.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / TOKENIZER if path.is_dir() else path
    is_alone = file.name != TOKENIZER or not any(
        (folder / name).exists() for name in SETTINGS_FILES
    )
    if is_alone and (file.is_file() or not path.is_dir()):
        import_tokenizers()
        with reading(f"--tokenizer: {path}", "name a tokenizer.json, or a folder with one"):
            return GivenTokenizer(folder, file.read_bytes())
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        raise ConfigError(
            f"--tokenizer: transformers, which is not installed, reads the settings in {folder}; "
            "pip install 'axsparse[hf]' with Python 3.11 or newer, or name a copy of its "
            f"{TOKENIZER} that lies alone"
        ) from None
    with _refusing(folder, "has no tokenizer that transformers reads"):
        # Neither code of the folder nor the network is used.
        loaded: Any = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        special = [one for one in loaded.special_tokens_map.values() if isinstance(one, str)]
        probe = PROBE.join(["", *special, ""])
        theirs = loaded(probe)["input_ids"]
        known = isinstance(loaded, PreTrainedTokenizerFast)
        text: str = loaded.backend_tokenizer.to_str(pretty=True) if known else "{}"
        split = bool(loaded.split_special_tokens)
        ours = import_tokenizers().Tokenizer.from_str(text) if known else None
        knows_words = loaded.get_vocab().keys() - loaded.get_added_vocab().keys()
    if not knows_words:  # as transformers makes one where a folder has no file of any
        raise DataError(
            f"--tokenizer: {folder} has no tokenizer, but special tokens alone; put its "
            f"{TOKENIZER} and {SETTINGS} there, or {ANOTHER_TOKENIZER}"
        )
    if ours is not None:
        ours.encode_special_tokens = split
    if ours is None or ours.encode(probe).ids != theirs:
        raise DataError(
            f"--tokenizer: {type(loaded).__name__} of {folder} has code of its own, or draws, "
            f"next to what a {TOKENIZER} says; write the input_ids that it makes as JSONL or "
            "Parquet, and prepare those"
        )
    return GivenTokenizer(folder, text.encode(), loaded.eos_token, split, loaded)


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """DataError for errors of the libraries: an Exception, or a panic of Rust, which is none and
    cannot be imported."""
    try:
        yield
    except BaseException as reason:
        if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
            raise
        said = printable(str(reason))
        # transformers names the last of the libraries that it tries.
        is_there = path.is_dir() and any(path.glob("*.model"))
        more = "pip install sentencepiece protobuf, or " if "tiktoken" in said and is_there else ""
        raise DataError(f"--tokenizer: {path} {what} ({said}); {more}{ANOTHER_TOKENIZER}") from None


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
    return str(tokenizer.to_str(pretty=True)).encode()


def set_threads(threads: int) -> None:
    """Threads of the library, which reads the number once: the first call in a process decides."""
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
    return f"tokenizers {import_tokenizers().__version__}"


BLEND, STDLIB = "blend of ", "stdlib"
"""The beginnings of the names of blends, and of the splits of the standard library."""
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
EOS = "eos_token_id"


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer that gives texts the ids of the training data."""

    tokenizer: Mapping[str, Any]
    """The contents of tokenizer.json."""
    end: str
    """The token that follows each document of the training data."""
    end_id: int
    begin: str
    """The token that begins each document. Without one, their end does, as GPT-2 has it: each end
    of a document in the data is followed by the beginning of another."""
    begin_id: int
    split_special_tokens: bool = False
    """Whether special tokens in a text are letters."""
    chat_template: str | Mapping[str, str] = ""
    """The template of the chats in the training data, or several by name."""
    chat_ends: Sequence[int] = ()
    """The ids that end an answer in them."""

    @property
    def ids(self) -> dict[str, int]:
        """For config.json and generation_config.json."""
        return {"bos_token_id": self.begin_id, EOS: self.end_id}

    def template_files(self) -> dict[str, bytes]:
        """The contents of the files of chat templates, by their paths."""
        one = self.chat_template
        named = {"default": one} if isinstance(one, str) else one
        return {
            JINJA
            if name == "default"
            else f"{MORE_JINJA}/{PurePath(name).name}.jinja": text.encode()
            for name, text in named.items()
            if text
        }

    def files(self, length: int) -> dict[str, dict[str, Any]]:
        """The contents of all files, by name; `length` is the longest text of the model."""
        return {
            TOKENIZER: dict(self.tokenizer),
            SETTINGS: {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": self.begin,
                "eos_token": self.end,
                "model_max_length": length,
                "clean_up_tokenization_spaces": False,
                "split_special_tokens": self.split_special_tokens,
            },
            GENERATION: with_ends(self.ids, self.chat_ends),
        }


def with_ends(generation: Mapping[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    """A generation_config.json that stops at these ids too."""
    there = generation.get(EOS)
    known = there if isinstance(there, list) else [] if there is None else [there]
    new = [id_ for id_ in ends if id_ not in known]
    return {**generation, EOS: [*known, *new]} if new else dict(generation)


def exported_tokenizer(data: DataConfig, name: str, fingerprint: str) -> ExportedTokenizer | None:
    """The tokenizer of the training data; None if the run read data of another origin. A blend has
    the tokenizer of its first source that was prepared.

    `name` and `fingerprint` belong to the training samples: a run in Python may have custom data.
    Raises MissingInputError if the folder of tokens or its tokenizer cannot be read, DataError if
    the tokenizer is not the one that made the tokens, ConfigError without the library for it.
    """
    if data.source == STDLIB and name == f"{STDLIB} train":
        return byte_tokenizer(STDLIB_SEPARATOR)
    folders = [Path(path) for path, _ in token_sources(data)]
    if data.source != "tokens" or not folders or (data.blend and not name.startswith(BLEND)):
        return None
    prepared = [path for path in folders if (path / SIDECAR).is_file()] or folders[:1]
    folder, sidecars = prepared[0], [read_sidecar(path, WHERE) for path in prepared]
    sidecar = sidecars[0]
    if not data.blend and sidecar.train.digest != fingerprint:
        return None
    if sidecar.tokenizer.kind == "bytes":
        return byte_tokenizer(sidecar.separator)
    path, end = folder / TOKENIZER, str(sidecar.settings.get("separator", SEPARATOR))
    with reading(f"{WHERE}: {path}", f"copy it again, or {PREPARE_AGAIN}"):
        digest = digest_of(path)
    if digest != sidecar.tokenizer.digest:
        raise DataError(
            f"{WHERE}: {path} is not the tokenizer that made the tokens; copy it again, or "
            f"{PREPARE_AGAIN}"
        )
    bare = {"truncation": None, "padding": None}  # The preparation neither cuts nor fills up.
    made = Subwords(path, sidecar.tokenizer, end)
    begin = int(made.first[0]) if made.first.size else sidecar.separator
    of_chats = [one for one in sidecars if one.chat_template and one.tokenizer == sidecar.tokenizer]
    chats = of_chats[0] if of_chats else sidecar
    return ExportedTokenizer(
        json.loads(path.read_bytes()) | bare,
        end,
        sidecar.separator,
        begin=end if begin == sidecar.separator else made.decode([begin]),
        begin_id=begin,
        split_special_tokens=sidecar.tokenizer.split_special_tokens,
        chat_template=chats.chat_template,
        chat_ends=chats.chat_ends,
    )


def check_tokenizers(config: Config) -> None:
    """ConfigError if the folder of the model or of its teacher, or one of the folders of tokens,
    has another tokenizer than the first of them.

    Two tokenizers are the same if no id means another word in each. Special and added words may
    differ: a model for chats renames some of them. A folder without a tokenizer.json may have any,
    and a model of which tensors begin anew may learn another vocabulary.
    """
    model = None if config.model.new else config.model.from_
    models = {"model.from": model, "train.teacher": config.train.teacher}
    key = "data.blend" if config.data.blend else "data.path"
    sources = [(key, path) for path, _ in token_sources(config.data)]
    places = [*models.items(), *sources, ("data.validation", config.data.validation)]
    folders = [(key, Path(path)) for key, path in places if path is not None]
    first, of_first = Path(), None
    for key, folder in folders:
        text = _tokenizer_text(folder)
        if text is None or text == of_first:
            continue
        if of_first is None:
            first, of_first = folder, text
            continue
        words, theirs = _ordinary_words(of_first), _ordinary_words(text)
        for id_ in words.keys() & theirs.keys():
            if words[id_] != theirs[id_]:
                way = "name one that has the same"
                if key not in models and (first / TOKENIZER).is_file():
                    way = f"prepare it by `axsparse data prepare --tokenizer {_options(first)}`"
                raise ConfigError(
                    f"{config.where(key)}: {folder} has another tokenizer than {first} (token "
                    f"{id_} is {theirs[id_]!r} here and {words[id_]!r} there); {way}"
                )


def _options(folder: Path) -> str:
    """The argument of `--tokenizer` for a folder, and its separator if it is one of tokens."""
    with suppress(OSError, DataError, MissingInputError):
        separator = str(read_sidecar(folder, WHERE).settings.get("separator", SEPARATOR))
        if separator != SEPARATOR:
            return f"{folder} --separator {shlex.quote(separator)}"
    return f"{folder}"


def _tokenizer_text(folder: Path) -> bytes | None:
    """The tokenizer.json of a folder of a model or of tokens, also where tokens are bytes."""
    with suppress(OSError, DataError, MissingInputError):
        if (folder / SIDECAR).is_file():
            sidecar = read_sidecar(folder, WHERE)
            if sidecar.tokenizer.kind == "bytes":
                return json.dumps(byte_tokenizer(sidecar.separator).tokenizer).encode()
        return (folder / TOKENIZER).read_bytes()
    return None


def _ordinary_words(text: bytes) -> dict[int, str]:
    """The words of a tokenizer.json by their ids, but for added ones; none of another format."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(text)
        words = content["model"]["vocab"]
        added = {one["id"] for one in content["added_tokens"]}
        is_scored = isinstance(words, list)  # words with their scores, by id
        by_id = enumerate(word for word, _ in words) if is_scored else map(reversed, words.items())
        return {id_: word for id_, word in by_id if id_ not in added}
    return {}


def byte_tokenizer(separator: int) -> ExportedTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8; the id `separator`, 0 … 255, ends a text.

    Texts that hold the byte `separator` itself lose it; texts of the training data do not.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_letters()) if byte != separator}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    by_bytes["use_regex"] = True
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": separator, "content": SEPARATOR, **flags, "special": True}],
        "pre_tokenizer": by_bytes,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": {**vocabulary, SEPARATOR: separator}, "merges": []},
    }
    return ExportedTokenizer(tokenizer, SEPARATOR, separator, SEPARATOR, separator)


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level encodings (Radford et al. 2019): itself if
    Latin-1 prints it, else the next one from U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
