"""Files of text, token ids and chats as documents, in order, and which of them cannot be used.

To add a format, write a `Reader` and name its file endings in `READERS`; to add a compression, name
its ending in `COMPRESSIONS`. A document that cannot be used is left out entirely and counted; it
never ends the preparation.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shlex
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeGuard, cast

from axsparse.data.chats import KWARGS, SYSTEM, TOOLS, WHY, Chat, Messages, chatml, of_functions
from axsparse.data.tables import open_table, open_zstd
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError
from axsparse.runtime.targets import IGNORED

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
STRETCH = 1 << 23
"""Bytes after which a document of a text file is handed on in stretches."""
FIRST = 100
"""Documents of a file that say whether there are chats or labels."""
PIECE = 1 << 16
"""Characters that are tokenized together; this takes about a hundred times their memory."""
SLACK = 1 << 13
"""Characters beyond a piece in which a place to cut is searched for."""
TABLES = (".parquet", ".arrow", ".json")
"""Endings of files whose documents have no lines, but rows."""
DATA_SETS = (".jsonl", ".ndjson", ".parquet", ".arrow")
"""Endings by which a folder holds a data set, whose other files are documents only where they have
an ending of data, or of texts: not its card, its licence or its scripts, as `datasets` has it."""
STATE_FILE = "state.json"
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", STATE_FILE)
"""Files of save_to_disk of `datasets`, next to its .arrow files, that are no documents."""
SPLITS = "train(?:ing)?|val|valid|validation|dev|test|testing|eval|evaluation"
SPLIT = re.compile(
    r"(?:^|/)(?:(\w*(?:train|valid|test|dev|eval)\w*)(?=-\d{5}-of-\d{5}|/data-\d{5}-of-\d{5}\.)"
    rf"|({SPLITS})(?=[-_.]?\d*[./]))"
)
"""Finds the split in the path of a file of a data set, as the hub names it: it begins the name of
the file or of one of its folders."""
SPLIT_WORD = re.compile(rf"(?<![^-._ 0-9/])(?:{SPLITS})(?=[-._ 0-9/])")
"""Finds splits elsewhere in a path, as `datasets` does: `gsm8k_train.jsonl`, `wiki.test.txt`."""
TEXTS = (".txt", ".raw", ".tokens")
"""Endings of texts, which are of different splits where their names are equal but for a word; in a
folder of code, where other names have such words too, the words mean something else."""
UNREADABLE = "unreadable"
NO_DATA = "no data (next to files of data; name it to take it)"
CACHE = "a cache, which state.json does not name (name it to take it)"
NAMED = 8
"""Fields of a record that are named where it has none that is read."""
WORD_END = re.compile(r"\S(?=[ \t\r\n])")
"""Finds the last letter of a word before white space."""


@dataclass(frozen=True)
class Reading:
    """How files are divided into documents."""

    split_documents: str = "none"
    """How text files are divided. `none`: a file is a document; `blank-line`: documents are
    separated by blank lines, which belong to none; `lines:N`: every N lines are a document;
    `regex:PATTERN`: a document begins at each line in which the pattern is found."""
    jsonl_field: str = ""
    """How JSONL files and tables are divided: each record, or row, is a document, and this is the
    key of its text, its token ids, or the messages of a chat. Without it, or where a record lacks
    it, the first of `KINDS` is taken that the record has. Next to token ids,
    `labels` are -100, and `completion_mask` and `assistant_masks` 0, for tokens that are no
    targets, and `attention_mask` is 0 for padding. Next to messages, `tools` and
    `chat_template_kwargs` go to the template, and `system` is their first message."""
    max_line: int = 16_000_000
    """The longest line of a usable document, in bytes."""


# -- formats --------------------------------------------------------------------------------


class Completion(NamedTuple):
    """A text that continues another; the loss counts it alone."""

    prompt: str
    completion: str


Content = list[int] | Chat | Completion
"""A document that is no text: token ids, of which -1 - id is no target, a chat, or a completion."""


class Piece(NamedTuple):
    """A document, or a part of a long one; a reader gives the first five fields and the last."""

    line: int
    """The line of the file, or the row of a table, at which the document begins, from 1 on."""
    text: str
    ends: bool = True
    """Whether the document ends here. A reader cuts a long document at the end of a line."""
    problem: str | None = None
    """Why the document cannot be used."""
    content: Content | None = None
    """The content of a document that is no text."""
    place: str = ""
    """File and line at which the document begins, for messages."""
    validation: bool = False
    read: int = 0
    """Bytes of the file that have been read so far."""
    choice: str = ""
    """The keys of a record that were taken and left out, where it could be several documents."""


Reader = Callable[[BinaryIO, Reading], Iterator[Piece]]
"""Yields the documents of one open, uncompressed file, with bounded memory. Whatever OSError it
raises makes the file unreadable."""


def read_text(file: BinaryIO, reading: Reading) -> Iterator[Piece]:
    """The documents of a text file, divided as `Reading.split_documents` says; every line ends in
    "\\n", as in Python's text files."""
    divides = divider(reading.split_documents)
    begin, block, problem = 1, bytearray(), cast("str | None", None)
    for number, (line, is_huge) in enumerate(_text_lines(file, reading.max_line), 1):
        if divides(line, number - begin):
            yield _decoded(begin, block, True, problem)
            begin, block, problem = number, bytearray(), None
            if reading.split_documents == "blank-line":
                begin += 1
                continue
        if is_huge:
            problem = "huge line"
        block += line
        if len(block) >= STRETCH:
            yield _decoded(begin, block, False, problem)
            block.clear()
    yield _decoded(begin, block, True, problem)


def read_json_lines(file: BinaryIO, reading: Reading) -> Iterator[Piece]:
    for number, (line, is_huge) in enumerate(_lines(file, reading.max_line), 1):
        if is_huge:
            yield Piece(number, "", problem="huge line")
        elif line.strip():
            yield _document(number, line, reading.jsonl_field)


def read_json(file: BinaryIO, reading: Reading) -> Iterator[Piece]:
    """The records of a file of JSON or JSONL as `datasets` reads it: a list, which is read as a
    whole, or one a line."""
    # What zstd has compressed cannot be read from the beginning again.
    ahead = io.BufferedReader(cast("io.RawIOBase", file), PIECE)
    try:
        yield from _json_records(ahead, ahead.peek(PIECE), reading)
    finally:
        ahead.detach()  # else it would close the file


def _json_records(file: BinaryIO, begin: bytes, reading: Reading) -> Iterator[Piece]:
    begin = begin.removeprefix(BYTE_ORDER_MARK).lstrip()
    first, _, rest = begin.partition(b"\n")
    is_indented = rest[:1] in (b" ", b"\t") and not first.rstrip().endswith(b"}")
    if not begin.startswith(b"[") and not is_indented and first.strip() != b"{":
        yield from read_json_lines(file, reading)
        return
    try:
        records = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        yield Piece(1, "", problem="malformed JSON")
        return
    if isinstance(records, dict):
        what = f"an object, neither a list nor a record a line (it has {_some(records)})"
        yield Piece(1, "", problem=what)
        return
    for number, record in enumerate(records, 1):
        yield _document(number, record, reading.jsonl_field)


def read_table(file: BinaryIO, reading: Reading, *, parquet: bool = False) -> Iterator[Piece]:
    kinds = _kinds(reading.jsonl_field)
    names, rows = open_table(file, {*OTHER_COLUMNS}.union(*kinds), parquet=parquet)
    if not any({*kind} <= {*names} for kind in kinds):
        yield Piece(1, "", problem=_missing(names, reading.jsonl_field))
        return
    for number, row in enumerate(rows, 1):
        yield _document(number, row, reading.jsonl_field)


def _reject(why: str, *_: object) -> NoReturn:
    raise OSError(0, why)


NO_FORMAT = "no format that is read; write it as JSONL or Parquet, by `datasets` say"
TEXT = ("text",)
PAIR = ("prompt", "completion")
"""Keys of two texts, or of messages."""
PREFERENCES = ("chosen", "rejected")
"""TRL's keys of answers; the prompt may be next to them, or at their beginning."""
FUNCTIONS = "functions"
"""OpenAI's older column of `tools`."""
KINDS = (("input_ids",), ("messages",), ("conversations",), PAIR, TEXT)
"""Keys of documents. A record that has several is the first that can be read, as in TRL: a chat
whose ids, or whose text, were added to it keeps its targets."""
LABELS = "labels"
MASKS = ("completion_mask", "assistant_masks")
"""Columns next to token ids: 0 for tokens that are no targets."""
LOSS_MASK = "loss_mask"
"""A column next to token ids that is 0 for tokens that are no targets in some programs, and for
those before them in others: it is rejected."""
PADDING = "attention_mask"
PACKED = ("seq_lengths", "position_ids")
"""Columns that say where documents begin that TRL has packed into one row of ids."""
OTHER_COLUMNS = (LABELS, PADDING, *MASKS, LOSS_MASK, *PACKED, TOOLS, FUNCTIONS, KWARGS, SYSTEM)
READERS: dict[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), read_json),
    ".parquet": partial(read_table, parquet=True),
    ".arrow": read_table,
    **dict.fromkeys((".csv", ".tsv"), partial(_reject, NO_FORMAT)),
}
"""The reader of each file ending; files of any other ending are text."""
COMPRESSIONS: dict[str, Callable[[BinaryIO], object]] = {
    ".gz": gzip.open,
    ".zst": open_zstd,
    **dict.fromkeys((".zip", ".bz2", ".xz", ".lz4"), partial(_reject, "an archive; unpack it")),
}
"""The opener of a compressed file by its ending; the ending before it names the format."""


def divider(how: str) -> Callable[[bytes, int], bool]:
    """Says whether a document ends before a line, which this many lines of it precede.

    Raises ConfigError if `how` is no rule of `Reading.split_documents`.
    """
    kind, colon, rest = how.partition(":")
    if how == "none":
        return lambda _, __: False
    if how == "blank-line":
        return lambda line, _: not line.strip()
    if kind == "lines" and rest.isascii() and rest.isdigit() and int(rest):
        return lambda _, before: before == int(rest)
    if kind == "regex" and colon:
        try:
            pattern = re.compile(rest)
        except re.error as reason:
            raise ConfigError(
                f"--split-documents: {rest!r} is no regular expression ({reason}); write it as "
                "Python's re module reads it"
            ) from None
        # Bytes that are not UTF-8 are reported when their document is decoded.
        return lambda line, _: bool(pattern.search(line.decode(errors="replace").rstrip("\r\n")))
    raise ConfigError(
        f"--split-documents: {how!r} is no way to split; choose none, blank-line, lines:N or "
        "regex:PATTERN"
    )


def _lines(file: BinaryIO, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it has more than `limit` bytes; then only its beginning is given."""
    line = file.readline(limit + 1).removeprefix(BYTE_ORDER_MARK)
    while line:
        is_huge = len(line) > limit and not line.endswith(b"\n")
        yield line, is_huge
        rest = line
        while is_huge and rest and not rest.endswith(b"\n"):
            rest = file.readline(PIECE)
        line = file.readline(limit + 1)


def _text_lines(file: BinaryIO, limit: int) -> Iterator[tuple[bytes, bool]]:
    """As `_lines`, for texts, in which a carriage return alone ends a line as well."""
    for line, is_huge in _lines(file, limit):
        has_more = line.count(b"\r") > line.endswith(b"\r\n")
        parts = filter(None, re.split(rb"(?<=\r)(?!\n)", line)) if has_more else [line]
        yield from ((part, is_huge) for part in parts)


def _decoded(line: int, block: bytearray, ends: bool, problem: str | None) -> Piece:
    if problem is None and b"\0" in block:
        problem = "no text (NUL bytes)"  # an archive, or text in another encoding
    if problem is not None:
        return Piece(line, "", ends, problem)
    try:
        text = block.decode("utf-8")
        # A block ends with a line: no "\r\n" is cut.
        return Piece(line, text.replace("\r\n", "\n").replace("\r", "\n"), ends)
    except UnicodeDecodeError:
        return Piece(line, "", ends, "not UTF-8")


def _document(number: int, given: object, field: str) -> Piece:
    """The document of a record, or of its JSON, or why it cannot be used."""
    try:
        record = json.loads(given.decode("utf-8")) if isinstance(given, bytes) else given
    except UnicodeDecodeError:
        return Piece(number, "", problem="not UTF-8")
    except (ValueError, RecursionError):
        return Piece(number, "", problem="malformed JSON (write each record as one line)")
    if not isinstance(record, dict):
        return Piece(number, "", problem=f"no record with fields ({type(record).__name__})")
    named, kinds = (field,), _kinds(field)
    found = [kind for kind in kinds if all(record.get(key) is not None for key in kind)]
    if not found:
        names = [key if value is not None else f"{key}: null" for key, value in record.items()]
        return Piece(number, "", problem=_missing(names, field))
    fit = [kind for kind in found if kind == named or _fits(kind, record)]
    taken, *others = fit or found[:1]
    if taken == PAIR:
        piece = _completion(number, record)
    elif taken[0] in PREFERENCES and _precedes(record.get(PAIR[0]), record[taken[0]]):
        piece = _completion(number, {**record, PAIR[1]: record[taken[0]]})
    else:
        piece = _single(number, record, taken[0], is_text=taken == (named if field else TEXT))
    if not others or taken == named:
        return piece
    names = [" with ".join(kind) for kind in (taken, *others)]
    return piece._replace(choice=f"{names[0]} taken, {', '.join(names[1:])} left out")


def _kinds(field: str) -> Sequence[tuple[str, ...]]:
    """The keys of documents in their order, where the user names one, or none."""
    return ((field,), *(kind for kind in KINDS[:-1] if kind != (field,))) if field else KINDS


def _fits(kind: tuple[str, ...], record: dict[str, Any]) -> bool:
    """Whether values have a type that this kind of document has, and are not empty."""
    types = {PAIR: (list, str, bytes), TEXT: (str, bytes, list)}.get(kind, list)
    return all(record[key] and isinstance(record[key], types) for key in kind)


def _precedes(prompt: Any, answer: Any) -> bool:
    """Whether a prompt is next to an answer that does not begin with it."""
    texts = isinstance(prompt, str | bytes) and type(prompt) is type(answer)
    if texts or (_are_messages(prompt) and _are_messages(answer)):
        return bool(prompt) and answer[: len(prompt)] != prompt
    return False


def _single(number: int, record: dict[str, Any], key: str, *, is_text: bool) -> Piece:
    """The document of one key; only where it `is_text`, it may be a text."""
    value = record[key]
    if value and _are_messages(value):
        return _chat(number, record, value)
    if isinstance(value, list) and all(isinstance(one, int) for one in value):
        return _ids(number, value, record)
    if not isinstance(value, str | bytes) or not is_text:
        parts = {type(one).__name__ for one in value} if isinstance(value, list) else ()
        kind = "str" if isinstance(value, bytes) else type(value).__name__  # a text of a table
        found = f"{kind}{' of ' if parts else ''}{' and '.join(sorted(parts))}"
        wanted = f"{'a text, ' if is_text else ''}a list of messages or of whole numbers"
        return Piece(number, "", problem=f"{key} that cannot be read ({found}; give {wanted})")
    text, problem = _text(value)
    return Piece(number, text, problem=problem or (None if text.strip() else "empty"))


def _text(value: object) -> tuple[str, str | None]:
    """A text of a record, in tables of bytes, and why it cannot be used."""
    try:
        text = value.decode() if isinstance(value, bytes) else str(value)
        text.encode()
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except UnicodeEncodeError:  # JSON can express "\ud800"
        return "", "half a character (a lone surrogate)"
    return text, None


def _are_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _chat(number: int, record: dict[str, Any], given: Messages, prompt: int | None = None) -> Piece:
    """The document of messages, after the record's `system` if it has one, as in ShareGPT; the
    first `prompt` messages are no targets."""
    try:
        messages, tools, system = chatml(given), _tools(record), record.get(SYSTEM)
    except ValueError as reason:
        return Piece(number, "", problem=str(reason))
    if not all(isinstance(message.get("role", ""), str) for message in messages):
        return Piece(number, "", problem="a role that is no text")
    text, problem = _text(system or "")
    if system and (problem or not isinstance(system, str | bytes)):
        return Piece(number, "", problem=f"{SYSTEM} that is no text")
    if text and messages and messages[0].get("role") != SYSTEM:
        messages = [{"role": SYSTEM, "content": text}, *messages]
        prompt = None if prompt is None else prompt + 1
    content = Chat(messages, tools, record.get(KWARGS), prompt)
    return Piece(number, "", problem=None if messages[prompt or 0 :] else "empty", content=content)


def _tools(record: dict[str, Any]) -> Any:
    """The schemas of a record's tools; ValueError for functions that are no list of schemas."""
    found = record.get(FUNCTIONS)
    if record.get(TOOLS) or not found:
        return record.get(TOOLS)
    if isinstance(found, str | bytes):
        with suppress(ValueError, RecursionError):
            found = json.loads(found)
    if not _are_messages(found):
        raise ValueError(f"{FUNCTIONS} that are no list of schemas")
    return of_functions(found)


def _completion(number: int, record: dict[str, Any]) -> Piece:
    """The document of a prompt and its completion: two texts, or the messages of both."""
    prompt, completion = (record[key] for key in PAIR)
    if _are_messages(prompt) and _are_messages(completion):
        return _chat(number, record, [*prompt, *completion], len(prompt))
    if not (isinstance(prompt, str | bytes) and isinstance(completion, str | bytes)):
        what = f"{' and '.join(PAIR)} that are neither two texts nor two lists of messages"
        return Piece(number, "", problem=what)
    (first, problem), (second, other) = _text(prompt), _text(completion)
    problem = problem or other or (None if completion else "empty")
    return Piece(number, "", problem=problem, content=Completion(first, second))


def _missing(found: Iterable[str], field: str) -> str:
    wanted = ", ".join(map(" with ".join, _kinds(field)))
    return f"missing field (it has {_some(found)}, and {wanted} are read; --jsonl-field adds one)"


def _some(found: Iterable[str]) -> str:
    names = sorted(found)
    return f"{', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}"[:WHY] or "none"


def _ids(number: int, ids: list[int], record: dict[str, Any]) -> Piece:
    """The document of token ids without padding; those whose label is -100, or for which a mask is
    0, are no targets."""
    if min(ids, default=0) < 0:
        return Piece(number, "", problem="ids beyond the vocabulary")
    lengths, places = (record.get(name) for name in PACKED)
    if isinstance(places, list) and isinstance(mask := record.get(PADDING), list):
        places = [place for place, is_here in zip(places, mask, strict=False) if is_here]
    if (isinstance(lengths, list) and lengths[1:]) or (
        isinstance(places, list) and 0 in places[1:]
    ):
        what = "several documents packed into a record: name the data before it was packed"
        return Piece(number, "", problem=what)
    names = (LABELS, PADDING, *MASKS)
    columns = {name: record[name] for name in names if record.get(name) is not None}
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != len(ids):
            return Piece(number, "", problem=f"{name} that do not fit the ids")
        if None in column:
            return Piece(number, "", problem=f"{name} with a null in place of a number")
    is_text = columns.get(PADDING, [1] * len(ids))
    labels = columns.get(LABELS, ids)
    lost = [] if columns.keys() - {PADDING} else record.get(LOSS_MASK) or []
    if any(is_here and not one for is_here, one in zip(is_text, lost, strict=False)):
        where = "programs differ in whether they are of these ids or of the next"
        what = f"{LOSS_MASK} with zeros ({where}; give {LABELS}, or {MASKS[0]})"
        return Piece(number, "", problem=what)
    content = []
    for at, (id_, label, is_here) in enumerate(zip(ids, labels, is_text, strict=True)):
        if not is_here:
            continue
        if label not in (id_, IGNORED):
            what = f"{LABELS} that do not fit the ids (each is the id at its place, or {IGNORED})"
            return Piece(number, "", problem=what)
        counts = label != IGNORED and all(columns[name][at] for name in MASKS if name in columns)
        content.append(id_ if counts else -1 - id_)
    return Piece(number, "", problem=None if content else "empty", content=content)


# -- files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DocumentSource:
    """A file, as it was when the preparation began."""

    path: str
    """The path with all links resolved."""
    name: str
    """The path that messages show: as the user gave it, or below a folder that was given."""
    size: int
    changed_ns: int
    validation: bool
    """Whether the user named it as validation data."""

    @property
    def named(self) -> PurePath:
        """The path whose endings say the format. The cache of the hub has links with endings to
        files without; a link without one has the format of its file."""
        name = PurePath(self.name)
        return name if name.suffix else PurePath(self.path)

    @property
    def reader(self) -> Reader:
        return READERS.get(_format(self.named), read_text)


def find_sources(
    training: Sequence[Path], validation: Sequence[Path], *written: Path
) -> tuple[list[DocumentSource], list[tuple[str, str]]]:
    """The named files, and the files below named folders in the order of their paths.

    Hidden files and the folders that are `written` are skipped. Each file is read once, as
    validation data if it is named as both. Returned second are the names of files and
    folders that are left out, and why. Raises MissingInputError for a path that is neither a file
    nor a folder, ConfigError for a folder of several splits.
    """
    found: dict[str, DocumentSource] = {}
    left_out: list[tuple[str, str]] = []
    for paths, is_validation in ((validation, True), (training, False)):
        for path in _files(paths, {Path(os.path.realpath(folder)) for folder in written}, left_out):
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    raise OSError
            except OSError:
                left_out.append((str(path), UNREADABLE))
                continue
            name, real = os.fsencode(path).decode("utf-8", "replace"), os.path.realpath(path)
            size, changed = status.st_size, status.st_mtime_ns
            found.setdefault(real, DocumentSource(real, name, size, changed, is_validation))
    return list(found.values()), left_out


def _files(
    paths: Sequence[Path], written: Collection[Path], left_out: list[tuple[str, str]]
) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
            continue
        if not path.is_dir():
            raise MissingInputError(
                f"input: {path} is neither a file nor a folder; name files of text, JSONL, Parquet "
                "or Arrow, or folders of them"
            )
        names = []
        entered = {*written, *path.resolve().parents}
        for folder, subfolders, files in os.walk(
            path,
            onerror=lambda error: left_out.append((error.filename, UNREADABLE)),
            followlinks=True,
        ):
            at = Path(folder)
            subfolders[:] = [
                name for name in sorted(subfolders) if _is_new(at / name, path, entered)
            ]
            names += [(at / name).relative_to(path) for name in files if name[0] != "."]
        endings = {*map(_format, names)}
        if not endings.isdisjoint(DATA_SETS):
            others = {name for name in names if _format(name) not in (*READERS, ".txt")}
            if ".arrow" in endings:
                others |= {name for name in names if name.name in METADATA}
                caches = _caches(path, names)
                left_out.extend((str(path / name), CACHE) for name in caches)
                names = [name for name in names if name not in caches]
            names = [name for name in names if name not in others]
            left_out.extend((str(path / name), NO_DATA) for name in others)
        taken = sorted(names, key=PurePath.as_posix)
        if found := _split_words(taken):
            splits = sorted({match[match.lastindex or 0] for match in found})
            lasts = {match.string: match for match in found}
            text = max(lasts, key=lambda name: name.count("train"))
            end = lasts[text].end()
            after = text[end] if text[end] in "-_." else ""
            begin = shlex.quote(f"{path}/{text[:end]}") + ("" if text[end] == "/" else f"{after}*")
            raise ConfigError(
                f"input: {path} holds the splits {', '.join(splits)}; name the files of one, such "
                f"as {begin}, and by --validation those that are held out"
            )
        yield from (path / name for name in taken)


def _is_new(folder: Path, root: Path, entered: set[Path]) -> bool:
    """Whether a folder below `root` is to be read: not if it is hidden, `entered`, which it then
    is, or a link to one that is read below `root` by its own name."""
    real, top = folder.resolve(), root.resolve()
    own = real.relative_to(top).parts if real.is_relative_to(top) else None
    is_again = folder.is_symlink() and own is not None and not any(one[0] == "." for one in own)
    if folder.name[0] == "." or real in entered or is_again:
        return False
    entered.add(real)
    return True


def _split_words(names: Iterable[PurePath]) -> list[re.Match[str]]:
    """The words in paths that name different splits; none where there is one split, or where such
    words stand in names that have nothing else in common, as in titles."""
    asked = {*DATA_SETS, ".json"}
    others = [name for name in names if _format(name) not in (*asked, *TEXTS)]
    if not any(SPLIT_WORD.search(name.as_posix()) for name in others):
        asked.update(TEXTS)
    begins: list[list[re.Match[str]]] = []
    alike: dict[str, list[list[re.Match[str]]]] = {}
    for name in (each for each in names if _format(each) in asked):
        path = name.as_posix()
        if (first := SPLIT.search(path)) and _format(name) not in TEXTS:
            begins.append([first])
        if words := [*SPLIT_WORD.finditer(path)]:
            alike.setdefault(SPLIT_WORD.sub("*", path), []).append(words)
    for found in (begins, *alike.values()):
        if len({tuple(match[match.lastindex or 0] for match in words) for words in found}) > 1:
            return [match for words in found for match in words]
    return []


def _caches(path: Path, names: Collection[PurePath]) -> set[PurePath]:
    """The .arrow files below a folder that belong to no data set of save_to_disk there: `map` of
    `datasets` leaves its results next to the files that state.json names."""
    found: set[PurePath] = set()
    for state in (name for name in names if name.name == STATE_FILE):
        try:
            listed = json.loads((path / state).read_bytes())["_data_files"]
            own = {state.parent / each["filename"] for each in listed}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # another's file
            continue
        tables = {name for name in names if _format(name) == ".arrow"}
        found |= {name for name in tables if name.parent == state.parent} - own
    return found


# -- documents ------------------------------------------------------------------------------


def documents(source: DocumentSource, reading: Reading, fraction: float) -> Iterator[Piece]:
    """The documents of a file in pieces; `fraction` of them are held out for validation.

    Documents of white space only are skipped; a file without any other is one empty document.
    What is `unreadable` gives a last piece with that problem. Raises DataError if the file has
    changed since it was found.
    """
    rest, held_out, begins, place, read = "", False, True, "", 0
    _, ending = _endings(source.named)
    unit = "row" if ending in TABLES else "line"
    try:
        with Path(source.path).open("rb") as raw:
            _check_unchanged(raw, source)
            file = cast("BinaryIO", COMPRESSIONS[ending](raw)) if ending in COMPRESSIONS else raw
            for found in source.reader(file, reading):
                is_blank = found.content is None and (not found.text or found.text.isspace())
                if begins and found.ends and found.problem is None and is_blank:
                    continue
                if begins:
                    held_out = source.validation or falls_to_validation(found, fraction)
                read, place = raw.tell(), f"{source.name}, {unit} {found.line}"
                found = found._replace(place=place, validation=held_out, read=read)
                *cut, rest = pieces(rest + found.text)
                yield from (found._replace(text=piece, ends=False) for piece in cut)
                if found.ends or found.problem is not None:
                    yield found._replace(text=rest)
                    rest = ""
                begins = found.ends
            _check_unchanged(raw, source)
    except (OSError, EOFError, zlib.error) as reason:
        why = " ".join((getattr(reason, "strerror", None) or str(reason)).split())[:WHY]
        place = f"{source.name} ({why})"
        yield Piece(1, "", True, UNREADABLE, None, place, held_out, read)
        return
    if not place:
        yield Piece(1, "", True, "empty", None, f"{source.name}, {unit} 1")


def first_contents(sources: Sequence[DocumentSource], reading: Reading) -> Iterator[Content]:
    """The contents that are no text of the first documents of files, but for those left out."""
    for source in sources:
        if source.reader is not read_text:
            for piece in islice(documents(source, reading, 0.0), FIRST):
                if piece.content is not None and piece.problem is None:
                    yield piece.content


def has_marks(content: Content | None) -> bool:
    """Whether a document has tokens that are no targets, or may have some."""
    return any(id_ < 0 for id_ in content) if isinstance(content, list) else content is not None


def _format(path: PurePath) -> str:
    """The ending of a file's name that says its format, before one of a compression."""
    before, ending = _endings(path)
    return before if ending in COMPRESSIONS else ending


def _endings(path: PurePath) -> list[str]:
    """The last two endings of a file's name, in small letters."""
    return ["", "", *map(str.lower, path.suffixes)][-2:]


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about `PIECE` characters, cut before white space after a word, or
    after `PIECE` characters if there is none within `SLACK`. The last piece may be empty."""
    begin = 0
    while len(text) - begin > PIECE + SLACK:
        end = begin + PIECE
        word = WORD_END.search(text, end - 1, end + SLACK)
        end = word.end() if word else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def falls_to_validation(begin: Piece, fraction: float) -> bool:
    """By a digest of the document's text, so that equal ones go to the same split."""
    if fraction == 0:
        return False
    content = begin.content.messages if isinstance(begin.content, Chat) else begin.content
    text = begin.text if content is None else json.dumps(content, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _check_unchanged(file: BinaryIO, source: DocumentSource) -> None:
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (source.size, source.changed_ns):
        raise DataError(
            f"input: {source.name} changed while it was being prepared; leave it alone and start "
            "again"
        )
