"""The tokenizer of a preparation: bytes, a file that is given, or byte-pair encoding learnt here.

Byte-pair encoding is learnt from a share of every part, so that the sample is spread evenly
over the sources. The file that is learnt is kept among the parts, for a run that goes on later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.data.prepare.documents import Reading
from axsparse.data.prepare.part import falls_to_validation
from axsparse.data.prepare.processes import apart
from axsparse.data.prepare.request import Request
from axsparse.data.prepare.text_sources import Part, bytes_of, pieces_of
from axsparse.data.prepare.tokenizers import (
    SEPARATOR,
    ByteTokenizer,
    TokenizerChoice,
    describe,
    train_bpe,
)
from axsparse.data.prepare.whole_files import copy_file, digest_of
from axsparse.data.token_file import TOKENIZER
from axsparse.runtime.console import Console, format_bytes, format_seconds
from axsparse.runtime.files.atomic import sync_folder


def choose_tokenizer(
    request: Request, parts: Sequence[Part], folder: Path, workers: int, console: Console
) -> TokenizerChoice:
    """The tokenizer that a request asks for; its file, if it has one, is put into `folder`.

    `folder` holds the finished parts. A vocabulary that an earlier run learnt there is used
    again. Learning takes `workers` threads, and raises TrainingError if its process is killed.
    """
    if request.train_bpe is not None:
        path = _earlier_vocabulary(folder)
        if path is None:
            began = time.monotonic()
            size = bytes_of(parts)
            sample = format_bytes(min(size, request.bpe_sample_bytes))
            console.line(f"learning {request.train_bpe:,} words from {sample} …")
            job = BpeJob(
                parts=tuple(parts),
                reading=request.reading,
                validation_fraction=request.validation_fraction,
                share=min(1.0, request.bpe_sample_bytes / max(1, size)),
                vocab_size=request.train_bpe,
                path=folder / TOKENIZER,
                threads=workers,
            )
            # A process of its own gives its memory back to the system.
            apart(learn_bpe, job)
            path = job.path.rename(folder / f"tokenizer-{digest_of(job.path)}.json")
            sync_folder(folder)
            console.line(f"learnt in {format_seconds(time.monotonic() - began)}")
        return TokenizerChoice(path, describe(path, "bpe"), SEPARATOR)
    if request.tokenizer is not None:
        path = folder / TOKENIZER
        copy_file(request.tokenizer, path)
        return TokenizerChoice(path, describe(path, "file"), request.separator)
    return TokenizerChoice(None, ByteTokenizer.record, "")


def _earlier_vocabulary(folder: Path) -> Path | None:
    """The unharmed tokenizer file of an earlier run: its name contains the digest of its contents.

    Files that do not match their names are removed.
    """
    for path in folder.glob("tokenizer-*.json"):
        if path.stem == f"tokenizer-{digest_of(path)}":
            return path
        path.unlink()
    return None


@dataclass(frozen=True)
class BpeJob:
    """What the process that learns byte-pair encoding is sent."""

    parts: tuple[Part, ...]
    reading: Reading
    validation_fraction: float
    share: float
    """Fraction of each part that is used, from its beginning."""
    vocab_size: int
    path: Path
    """The file that is written."""
    threads: int


def learn_bpe(job: BpeJob) -> None:
    """Learn from a share of the training documents.

    Sets environment variables, hence runs in a process that does nothing else.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(job.threads)}
    train_bpe(_sample(job), job.vocab_size, job.path)


def _sample(job: BpeJob) -> Iterator[str]:
    for part in job.parts:
        left = math.ceil(job.share * bytes_of([part]))
        for stretch in part:
            if stretch.source.validation or left <= 0:
                continue
            for piece in pieces_of(stretch, job.reading):
                if left <= 0:
                    break
                if not falls_to_validation(piece.text, job.validation_fraction):
                    yield piece.text[:left]
                    left -= len(piece.text)
