"""Finds the files to read, and cuts them into parts that workers process independently.

The cuts depend only on the files and the settings, never on the number of workers.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import BinaryIO

from axsparse.data.prepare.documents import (
    UNREADABLE,
    Piece,
    Reading,
    Splitter,
    record_pieces,
    skip_line,
    text_pieces,
)
from axsparse.data.prepare.tokenizers import WORD_END
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

JSONL_ENDINGS = (".jsonl", ".ndjson")
WINDOW = 1 << 20
"""Bytes in which a good place to cut is searched for."""


@dataclass(frozen=True)
class Source:
    """A file, as it was when the preparation began."""

    path: str
    """The path with all links resolved."""
    name: str
    """The path that messages show: as the user gave it, or below a folder that was given."""
    size: int
    """Size in bytes."""
    changed_ns: int
    """Time of the last change, in nanoseconds."""
    validation: bool
    """Whether the user named it as validation data."""


@dataclass(frozen=True)
class Stretch:
    """The bytes [begin, end) of a file."""

    source: Source
    begin: int
    end: int


Part = tuple[Stretch, ...]
"""The text that a worker processes at a time: whole small files, or a stretch of a large one."""


@dataclass(frozen=True)
class Sources:
    """The files to read."""

    files: tuple[Source, ...]
    unreadable: tuple[str, ...]
    """Names of files and folders that cannot be opened."""


@dataclass(frozen=True)
class Filter:
    """Which files of a folder are read: patterns of the shell, such as *.txt or drafts/*.

    Each is held against a file's name and against its path below the folder, in which * also
    stands for slashes.
    """

    include: tuple[str, ...] = ()
    """One of them has to fit, if there are any."""
    exclude: tuple[str, ...] = ()
    """None of them may fit."""

    def takes(self, path: PurePath) -> bool:
        """Whether the file at this path below a folder is read."""

        def fits(pattern: str) -> bool:
            return fnmatchcase(path.name, pattern) or fnmatchcase(path.as_posix(), pattern)

        return (not self.include or any(map(fits, self.include))) and not any(
            map(fits, self.exclude)
        )


ALL = Filter()


def find_sources(
    training: Sequence[Path], validation: Sequence[Path], out: Path, wanted: Filter = ALL
) -> Sources:
    """The files that are named, and those below named folders in the order of their paths.

    Hidden files, links to folders, the folder `out` and files of folders that are not `wanted`
    are skipped. Each file is read once, as validation data if it is named as both. Raises
    MissingInputError for a path that is neither a file nor a folder, ConfigError if `wanted`
    leaves no file.
    """
    unreadable: list[str] = []
    held_out = list(_files(validation, out, unreadable, wanted))
    kept = {os.path.realpath(path) for path in held_out}
    named = [(path, True) for path in held_out]
    named += [
        (path, False)
        for path in _files(training, out, unreadable, wanted)
        if os.path.realpath(path) not in kept
    ]
    found: dict[str, Source] = {}
    for path, is_validation in named:
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError
        except OSError:
            unreadable.append(str(path))
            continue
        name = os.fsencode(path).decode("utf-8", "replace")
        source = Source(
            os.path.realpath(path), name, status.st_size, status.st_mtime_ns, is_validation
        )
        found.setdefault(source.path, source)
    if wanted != ALL and not found:
        raise ConfigError(
            "input: no file is left by --include and --exclude; a pattern fits a file's name, such "
            "as '*.txt', or its path below the folder, such as 'drafts/*'"
        )
    return Sources(tuple(found.values()), tuple(unreadable))


def _files(
    paths: Sequence[Path], out: Path, unreadable: list[str], wanted: Filter
) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _below(path, out.resolve(), unreadable, wanted)
        elif path.is_file():
            yield path
        else:
            raise MissingInputError(
                f"input: {path} is neither a file nor a folder; name text files, JSONL files or "
                "folders of them"
            )


def _below(root: Path, out: Path, unreadable: list[str], wanted: Filter) -> Iterator[Path]:
    names = []
    lost = unreadable.append
    for folder, subfolders, files in os.walk(root, onerror=lambda error: lost(error.filename)):
        at = Path(folder)
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and (at / name).resolve() != out
        ]
        names += [(at / name).relative_to(root) for name in files if not name.startswith(".")]
    ordered = sorted(names, key=lambda name: name.as_posix())
    yield from (root / name for name in ordered if wanted.takes(name))


def cut(sources: Sources, reading: Reading, part_bytes: int) -> tuple[list[Part], Sources]:
    """Parts of about `part_bytes` each, and the sources, now with all unreadable files named."""
    splitter = Splitter(reading.split_documents)
    parts: list[Part] = []
    lost = list(sources.unreadable)
    small: list[Stretch] = []
    held = 0
    files = []
    for source in sources.files:
        if source.size > part_bytes:
            try:
                with Path(source.path).open("rb") as file:
                    ends = list(_ends(file, source, splitter, reading, part_bytes))
            except OSError:
                lost.append(source.name)
                continue
            begins = [0, *ends[:-1]]
            if small:
                parts.append(tuple(small))
                small, held = [], 0
            parts += [
                (Stretch(source, begin, end),) for begin, end in zip(begins, ends, strict=True)
            ]
        else:
            if held + source.size > part_bytes:
                parts.append(tuple(small))
                small, held = [], 0
            small.append(Stretch(source, 0, source.size))
            held += source.size
        files.append(source)
    if small:
        parts.append(tuple(small))
    return parts, Sources(tuple(files), tuple(lost))


def _ends(
    file: BinaryIO, source: Source, splitter: Splitter, reading: Reading, part_bytes: int
) -> Iterator[int]:
    """The bytes at which the stretches of a large file end."""
    at = part_bytes
    while at < source.size:
        file.seek(at)
        if is_jsonl(source):
            at += skip_line(file)
        elif splitter.whole:
            at += _to_word_end(file.read(WINDOW))
        else:
            at += _to_document(file, splitter, reading.max_line)
        if at < source.size:
            yield at
        at += part_bytes
    yield source.size


def is_jsonl(source: Source) -> bool:
    """Whether each line of a file is a JSON record."""
    return source.path.endswith(JSONL_ENDINGS)


def _to_word_end(window: bytes) -> int:
    """Number of bytes up to the end of a word, across which no token reaches (see
    `tokenizers.pieces`); up to the next character if there is none."""
    begin = _to_character(window)
    text = window[begin:].decode("utf-8", "surrogateescape")
    found = WORD_END.search(text)
    if found is None:
        return begin
    return begin + len(text[: found.end()].encode("utf-8", "surrogateescape"))


def _to_document(file: BinaryIO, splitter: Splitter, max_line: int) -> int:
    """Number of bytes up to the next document, else the next line, else the next character."""
    begin = file.readline(max_line + 1)
    first = at = len(begin)
    if not begin.endswith(b"\n"):
        # The end of the file, or a line so long that its document cannot be used.
        return first if first <= max_line else _to_character(begin)
    for line in io.BytesIO(file.read(WINDOW)):
        if line.endswith(b"\n") and splitter.divides(line):
            return at
        at += len(line)
    return first


def _to_character(window: bytes) -> int:
    """Number of bytes up to the next character of UTF-8."""
    return next((at for at in range(min(3, len(window))) if window[at] & 0xC0 != 0x80), 3)


def pieces_of(stretch: Stretch, reading: Reading) -> Iterator[Piece]:
    """The documents of a stretch; raises DataError if the file has changed since it was found.

    A file that can no longer be read gives one piece with that problem.
    """
    source = stretch.source
    begin, end = stretch.begin, stretch.end
    try:
        with Path(source.path).open("rb") as file:
            _check_unchanged(file, source)
            if is_jsonl(source):
                yield from record_pieces(file, begin, end, reading)
                return
            file.seek(max(0, begin - 1))
            mid_line = begin > 0 and file.read(1) != b"\n"
            block = file.read(end - begin)
            _check_unchanged(file, source)
    except OSError:
        opens, closes = begin == 0, end == source.size
        if is_jsonl(source):  # Each line is a document.
            opens = closes = True
        yield Piece(begin, "", opens=opens, closes=closes, problem=UNREADABLE)
        return
    splitter = Splitter(reading.split_documents)
    yield from text_pieces(block, begin, source.size, splitter, reading.max_line, mid_line=mid_line)


def _check_unchanged(file: BinaryIO, source: Source) -> None:
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (source.size, source.changed_ns):
        raise DataError(
            f"input: {source.name} changed while it was being prepared; leave it alone and start "
            "again"
        )


def bytes_of(parts: Iterable[Part]) -> int:
    """Number of bytes of text in these parts."""
    return sum(stretch.end - stretch.begin for part in parts for stretch in part)
