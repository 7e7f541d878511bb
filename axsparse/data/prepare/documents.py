"""Finds the documents in text files and JSONL files, and those that cannot be used.

A document that cannot be used is left out as a whole and counted; it never ends the preparation.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from axsparse.runtime.errors import ConfigError

Problem = Literal[
    "not UTF-8", "empty", "huge line", "malformed JSON", "missing field", "unreadable"
]
NOT_UTF8: Problem = "not UTF-8"
EMPTY: Problem = "empty"
HUGE_LINE: Problem = "huge line"
MALFORMED_JSON: Problem = "malformed JSON"
MISSING_FIELD: Problem = "missing field"
UNREADABLE: Problem = "unreadable"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SKIPPED = 1 << 20
"""Bytes of a line that are skipped at a time."""


@dataclass(frozen=True)
class Reading:
    """How files are divided into documents."""

    split_documents: str = "none"
    """How text files are divided. `none`: a file is a document; `blank-line`: documents are
    separated by blank lines, which belong to none; `lines:N`: every N lines are a document;
    `regex:PATTERN`: a document begins at each line in which the pattern is found."""
    jsonl_field: str = "text"
    """How JSONL files are divided: each record is a document, and this is the key of its text."""
    max_line: int = 16_000_000
    """The longest line of a usable document, in bytes."""


@dataclass(frozen=True)
class Piece:
    """A document, or as much of it as lies in one stretch of a file."""

    at: int
    """The byte of the file at which the piece begins."""
    text: str
    """The text; empty if there is a problem."""
    opens: bool
    """Whether the document begins here."""
    closes: bool
    """Whether the document ends here."""
    problem: Problem | None = None
    """Why the document cannot be used; None if this piece is usable."""
    lead: int = 0
    """Bytes before the first end of line; all bytes of the piece if no line ends in it."""
    trail: int | None = None
    """Bytes after the last end of line; None if no line ends in the piece."""

    @property
    def blank(self) -> bool:
        """Whether the text consists of white space only."""
        return not self.text or self.text.isspace()


class Splitter:
    """Finds the documents of text files by the rule of `Reading.split_documents`."""

    def __init__(self, how: str) -> None:
        """Raises ConfigError if `how` is not a rule."""
        kind, colon, rest = how.partition(":")
        self.whole = how == "none"
        """Whether each file is one document."""
        self._blank_lines = how == "blank-line"
        self._count = int(rest) if kind == "lines" and rest.isascii() and rest.isdigit() else 0
        self._pattern: re.Pattern[str] | None = None
        if kind == "regex" and colon:
            try:
                self._pattern = re.compile(rest)
            except re.error as reason:
                raise ConfigError(
                    f"--split-documents: {rest!r} is no regular expression ({reason}); write it "
                    "as Python's re module reads it"
                ) from None
        elif not (self.whole or self._blank_lines or self._count):
            raise ConfigError(
                f"--split-documents: {how!r} is no way to split; choose none, blank-line, "
                "lines:N or regex:PATTERN"
            )

    def divides(self, line: bytes, lines_before: int = 0) -> bool:
        """Whether a document ends before this line; `lines_before` of its lines came earlier."""
        if self._blank_lines:
            return not line.strip()
        if self._pattern is None:
            return not self.whole and lines_before % self._count == 0
        # Bytes that are not UTF-8 are reported when their document is read.
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        return self._pattern.search(text) is not None

    def spans(self, block: bytes, *, mid_line: bool) -> Iterator[tuple[int, int]]:
        """The (begin, end) of each document in a block of lines, in order.

        The first span belongs to the document that the block begins in, and the last one to
        the document that it ends in; either may be empty. `mid_line` says that the block
        begins within a line.
        """
        if self.whole:
            yield 0, len(block)
            return
        begin = at = lines = 0
        head = True
        for line in io.BytesIO(block):
            if at > 0 or not mid_line:
                if self.divides(line, lines):
                    if head or at > begin:
                        yield begin, at
                    head, lines = False, 0
                    # A blank line belongs to no document; the next document begins after it.
                    begin = at + len(line) if self._blank_lines else at
                lines += 1
            at += len(line)
        yield begin, at


def text_pieces(
    block: bytes, at: int, size: int, splitter: Splitter, max_line: int, *, mid_line: bool
) -> Iterator[Piece]:
    """The documents in `block`, the bytes [at, at + len(block)) of a text file of `size` bytes.

    `mid_line` says that the block begins within a line.
    """
    spans = splitter.spans(block, mid_line=mid_line)
    span: tuple[int, int] | None = next(spans)
    opens, usable = at == 0, False
    while span is not None:
        begin, end = span
        span = next(spans, None)
        closes = span is not None or at + len(block) == size
        piece = _text_piece(block[begin:end], at + begin, max_line, opens=opens, closes=closes)
        usable |= piece.problem is not None or not piece.blank
        yield piece
        opens = True
    if at == 0 and len(block) == size and not usable:
        yield Piece(0, "", opens=True, closes=True, problem=EMPTY)


def _text_piece(data: bytes, at: int, max_line: int, *, opens: bool, closes: bool) -> Piece:
    if at == 0:
        data = data.removeprefix(BYTE_ORDER_MARK)
    text = ""
    problem: Problem | None = None
    if _has_line_above(data, max_line):
        problem = HUGE_LINE
    else:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            problem = NOT_UTF8
    first = data.find(b"\n")
    return Piece(
        at,
        text,
        opens=opens,
        closes=closes,
        problem=problem,
        lead=len(data) if first < 0 else first,
        trail=None if first < 0 else len(data) - 1 - data.rfind(b"\n"),
    )


def _has_line_above(data: bytes, limit: int) -> bool:
    """Whether a line has more than `limit` bytes.

    Searches for an end of line backwards from each place where a line would become too long,
    so that most bytes are not looked at.
    """
    begin = 0
    while len(data) - begin > limit:
        end = data.rfind(b"\n", begin, begin + limit + 1)
        if end < 0:
            return True
        begin = end + 1
    return False


def record_pieces(file: BinaryIO, begin: int, end: int, reading: Reading) -> Iterator[Piece]:
    """The records of a JSONL file whose lines begin in the bytes [begin, end)."""
    file.seek(begin)
    at = begin
    while at < end:
        line = file.readline(reading.max_line + 1)
        if not line:
            return
        if len(line) > reading.max_line and not line.endswith(b"\n"):
            yield Piece(at, "", opens=True, closes=True, problem=HUGE_LINE)
            at += len(line) + skip_line(file)
            continue
        content = line if at else line.removeprefix(BYTE_ORDER_MARK)
        if content.strip():
            text, problem = _field(content, reading.jsonl_field)
            yield Piece(at, text, opens=True, closes=True, problem=problem)
        at += len(line)


def skip_line(file: BinaryIO) -> int:
    """Read to the end of a line in small blocks; returns the number of bytes."""
    skipped = 0
    while rest := file.readline(SKIPPED):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _field(line: bytes, field: str) -> tuple[str, Problem | None]:
    """The text of a record, or why it cannot be used."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "", NOT_UTF8
    except (ValueError, RecursionError):
        return "", MALFORMED_JSON
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "", MISSING_FIELD
    if not text.strip():
        return "", EMPTY
    try:
        text.encode()
    except UnicodeEncodeError:  # A lone surrogate such as "\ud800", which JSON can express.
        return "", NOT_UTF8
    return text, None
