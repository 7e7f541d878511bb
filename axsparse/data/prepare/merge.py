"""Merges part files, in order, into one file of tokens for each split.

The pieces of a document that reaches over several parts are joined here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from axsparse.data.prepare.documents import HUGE_LINE, UNREADABLE
from axsparse.data.prepare.part import EXAMPLES, FinishedPart, Fragment
from axsparse.data.prepare.whole_files import BLOCK, new_file
from axsparse.data.token_file import Split, TokenFormat, stored, token_path
from axsparse.runtime.errors import DataError


@dataclass(frozen=True)
class TokenCounts:
    """The contents of one file of tokens, counted."""

    documents: int
    tokens: int
    """Number of tokens, separators included."""
    digest: str
    """BLAKE2b-128 of the file."""


@dataclass(frozen=True)
class MergeResult:
    """How many documents were written, and how many left out."""

    splits: dict[Split, TokenCounts]
    left_out: dict[str, int]
    """Number of documents left out, by reason."""
    examples: tuple[str, ...]
    """The first of these: file, byte at which the document begins, reason."""


class _Output:
    """A file of tokens that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self.documents = 0
        self.tokens = 0
        self.digest = hashlib.blake2b(digest_size=16)
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)


@dataclass(frozen=True)
class _TokenRange:
    """Consecutive tokens of a part file."""

    path: Path
    first: int
    """Position of the first, counted in tokens."""
    tokens: int


def merge(
    parts: Iterable[FinishedPart],
    folder: Path,
    splits: Iterable[Split],
    *,
    form: TokenFormat,
    max_line: int,
    unreadable: Sequence[str] = (),
) -> MergeResult:
    """Write one file of tokens for each split; the files get their names once all are complete.

    `parts` come in order; an iterator may make them meanwhile. A document with a line of more
    than `max_line` bytes is left out. `unreadable` names files, which are counted with the
    documents left out. Raises DataError if a split stays empty.
    """
    with contextlib.ExitStack() as files:
        outputs = {
            split: _Output(files.enter_context(new_file(token_path(folder, split))))
            for split in splits
        }
        merger = _Merger(outputs, form, max_line)
        merger.leave_out({UNREADABLE: len(unreadable)}, [f"{n}: {UNREADABLE}" for n in unreadable])
        for made in parts:
            merger.add(made)
        merger.refuse_empty()
    return MergeResult(
        {
            split: TokenCounts(output.documents, output.tokens, output.digest.hexdigest())
            for split, output in outputs.items()
        },
        dict(merger.left_out),
        tuple(merger.examples),
    )


class _Merger:
    """Copies parts into the files of their splits, and joins the documents across parts."""

    def __init__(self, outputs: dict[Split, _Output], form: TokenFormat, max_line: int) -> None:
        self.left_out: Counter[str] = Counter()
        self.examples: list[str] = []
        self._outputs = outputs
        self._itemsize = stored(form.dtype).itemsize
        self._separator = form.separator_bytes
        self._max_line = max_line
        self._open: Fragment | None = None
        """The document whose end has not been reached, as far as its pieces are known."""
        self._waiting: list[_TokenRange] = []
        """Where the tokens of the open document lie."""

    def add(self, made: FinishedPart) -> None:
        record, at = made.record, 0
        if record.head is not None:
            self._join(record.head, _TokenRange(made.path, at, record.head.tokens))
            at += record.head.tokens
        self.leave_out(record.left_out, record.examples)
        for run in record.runs:
            output = self._outputs["validation" if run.validation else "train"]
            self._copy(_TokenRange(made.path, at, run.tokens), output)
            output.documents += run.documents
            at += run.tokens
        if record.tail is not None:
            self._join(record.tail, _TokenRange(made.path, at, record.tail.tokens))

    def leave_out(self, counts: Mapping[str, int], examples: Sequence[str]) -> None:
        """Count documents that cannot be used; the first of them are kept as examples."""
        self.left_out.update({name: count for name, count in counts.items() if count})
        self.examples += examples[: EXAMPLES - len(self.examples)]

    def refuse_empty(self) -> None:
        """Raise DataError if a split has no document."""
        assert self._open is None, "a document without end"
        documents = sum(output.documents for output in self._outputs.values())
        if documents == 0:
            reasons = ", ".join(f"{count} {name}" for name, count in self.left_out.items())
            first = f"; the first: {self.examples[0]}" if self.examples else ""
            raise DataError(
                f"input: no document can be used ({reasons or 'all are empty'}{first}); name "
                "UTF-8 text files or JSONL files with --jsonl-field"
            )
        for split, output in self._outputs.items():
            if output.documents == 0:
                raise DataError(
                    f"{split}: none of the {documents} documents is left for it; give "
                    "--validation-fraction another value, mark documents by --split-documents, or "
                    "name validation files by --validation"
                )

    def _join(self, fragment: Fragment, where: _TokenRange) -> None:
        """Add a piece to the open document, and write the document if it ends here."""
        assert fragment.opens == (self._open is None), "parts out of order"
        self._open = (
            fragment if self._open is None else joined(self._open, fragment, self._max_line)
        )
        self._waiting.append(where)
        if not fragment.closes:
            return
        document, waiting = self._open, self._waiting
        self._open, self._waiting = None, []
        if document.problem is not None:
            self.leave_out({document.problem: 1}, [f"{document.place}: {document.problem}"])
        elif not document.blank:
            output = self._outputs["validation" if document.validation else "train"]
            for part in waiting:
                self._copy(part, output)
            output.write(self._separator)
            output.documents += 1
            output.tokens += 1

    def _copy(self, where: _TokenRange, output: _Output) -> None:
        left = where.tokens * self._itemsize
        output.tokens += where.tokens
        with where.path.open("rb") as file:
            file.seek(where.first * self._itemsize)
            while left:
                data = file.read(min(left, BLOCK))
                assert data, f"{where.path} is shorter than its record says"
                output.write(data)
                left -= len(data)


def joined(first: Fragment, second: Fragment, max_line: int) -> Fragment:
    """Two neighbouring pieces of one document as one piece."""
    last_line = first.lead if first.trail is None else first.trail
    line = last_line + second.lead
    trail = second.trail
    if trail is None and first.trail is not None:
        trail = line
    return first.model_copy(
        update={
            "tokens": first.tokens + second.tokens,
            "closes": second.closes,
            "problem": first.problem or second.problem or (HUGE_LINE if line > max_line else None),
            "blank": first.blank and second.blank,
            # A blank first piece says nothing of the split: the first words are in the second.
            "validation": second.validation if first.blank else first.validation,
            "lead": line if first.trail is None else first.lead,
            "trail": trail,
        }
    )
