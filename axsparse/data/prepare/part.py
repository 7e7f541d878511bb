"""Turns one part of the text into a part file: a file of tokens, with a record beside it.

A part file holds, in this order: the end of a document that began in an earlier part, whole
documents with their separators, and the beginning of a document that ends in a later part.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from axsparse.data.prepare.documents import Piece, Problem, Reading
from axsparse.data.prepare.text_sources import Part, Stretch, bytes_of, pieces_of
from axsparse.data.prepare.tokenizers import TokenizerChoice, open_tokenizer
from axsparse.data.prepare.whole_files import digest_of, new_file
from axsparse.data.token_file import Record, TokenFormat, stored

EXAMPLES = 20
"""Number of left-out documents that are named; all of them are counted."""


class Run(Record):
    """Consecutive whole documents that belong to the same split."""

    validation: bool
    """Whether the split is validation."""
    documents: int
    tokens: int
    """Number of tokens, separators included."""


class Fragment(Record):
    """The piece that one part holds of a document that reaches over several parts.

    The fields that it shares with `Piece` mean what they mean there.
    """

    place: str
    """File and byte at which the piece begins, for messages."""
    tokens: int
    opens: bool
    closes: bool
    problem: Problem | None
    blank: bool
    validation: bool
    lead: int
    trail: int | None


class PartRecord(Record):
    """The contents of a part file."""

    source_bytes: int
    """Bytes of text that the part was made from."""
    digest: str
    """BLAKE2b-128 of the part file."""
    head: Fragment | None
    """The end of a document that began in an earlier part."""
    runs: tuple[Run, ...]
    tail: Fragment | None
    """The beginning of a document that ends in a later part."""
    left_out: dict[str, int]
    examples: tuple[str, ...]


@dataclass(frozen=True)
class PartJob:
    """What a worker process is sent to make one part."""

    number: int
    part: Part
    folder: Path
    """The folder of parts."""
    tokenizer: TokenizerChoice
    form: TokenFormat
    reading: Reading
    validation_fraction: float

    @property
    def path(self) -> Path:
        return self.folder / f"part-{self.number:06}.tokens"


@dataclass(frozen=True)
class FinishedPart:
    """A part file that lies on the disk with its record."""

    path: Path
    record: PartRecord
    kept: bool
    """Whether an earlier run made the part."""


def make_part(job: PartJob) -> FinishedPart:
    """Make a part, unless an earlier run has left it complete and unharmed."""
    record_path = job.path.with_suffix(".json")
    try:
        record = PartRecord.model_validate_json(record_path.read_bytes())
        if digest_of(job.path) == record.digest:
            return FinishedPart(job.path, record, kept=True)
    except (OSError, ValidationError):
        pass  # There is no record, or it is damaged: the part is made again.
    with new_file(job.path) as file:
        record = _Writer(job, file).write()
    with new_file(record_path) as file:
        file.write(record.model_dump_json().encode())
    return FinishedPart(job.path, record, kept=False)


class _Writer:
    """Writes one part file and collects its record."""

    def __init__(self, job: PartJob, file: BinaryIO) -> None:
        self._job = job
        self._file = file
        self._tokenizer = open_tokenizer(job.tokenizer)
        self._dtype = stored(job.form.dtype)
        self._separator = job.form.separator_bytes
        self._digest = hashlib.blake2b(digest_size=16)
        self._head: Fragment | None = None
        self._runs: list[Run] = []
        self._tail: Fragment | None = None
        self._left_out: Counter[str] = Counter()
        self._examples: list[str] = []

    def write(self) -> PartRecord:
        for stretch in self._job.part:
            for piece in pieces_of(stretch, self._job.reading):
                if piece.opens and piece.closes:
                    self._add_document(piece, stretch)
                else:
                    self._add_fragment(piece, stretch)
        return PartRecord(
            source_bytes=bytes_of([self._job.part]),
            digest=self._digest.hexdigest(),
            head=self._head,
            runs=tuple(self._runs),
            tail=self._tail,
            left_out=dict(self._left_out),
            examples=tuple(self._examples),
        )

    def _add_document(self, piece: Piece, stretch: Stretch) -> None:
        if piece.problem is not None:
            self._left_out[piece.problem] += 1
            if len(self._examples) < EXAMPLES:
                self._examples.append(f"{_place(piece, stretch)}: {piece.problem}")
            return
        if piece.blank:
            return
        validation = self._for_validation(piece, stretch)
        tokens = self._write_tokens(piece.text) + 1
        self._write_bytes(self._separator)
        documents = 1
        if self._runs and self._runs[-1].validation == validation:
            last = self._runs.pop()
            documents, tokens = last.documents + documents, last.tokens + tokens
        self._runs.append(Run(validation=validation, documents=documents, tokens=tokens))

    def _add_fragment(self, piece: Piece, stretch: Stretch) -> None:
        fragment = Fragment(
            place=_place(piece, stretch),
            tokens=self._write_tokens(piece.text),
            opens=piece.opens,
            closes=piece.closes,
            problem=piece.problem,
            blank=piece.blank,
            validation=self._for_validation(piece, stretch),
            lead=piece.lead,
            trail=piece.trail,
        )
        if piece.opens:
            self._tail = fragment
        else:
            self._head = fragment

    def _for_validation(self, piece: Piece, stretch: Stretch) -> bool:
        return stretch.source.validation or falls_to_validation(
            piece.text, self._job.validation_fraction
        )

    def _write_tokens(self, text: str) -> int:
        ids = self._tokenizer.encode(text).astype(self._dtype, copy=False)
        self._write_bytes(ids.data)
        return len(ids)

    def _write_bytes(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)


def falls_to_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out for validation.

    A digest of its text decides, so that equal documents go to the same split.
    """
    if fraction == 0:
        return False
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _place(piece: Piece, stretch: Stretch) -> str:
    return f"{stretch.source.name}, byte {piece.at}"
