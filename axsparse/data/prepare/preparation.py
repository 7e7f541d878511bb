"""`axsparse data prepare`: text files become memory-mapped tokens; a killed run can be continued.

The sources are cut into parts. Each part becomes a file of tokens by itself, and these files
are merged in order. Finished parts lie in a folder named after the request until tokens.json
is written, so that a run which was killed goes on where it was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from axsparse.data.prepare.merge import MergeResult, merge
from axsparse.data.prepare.part import EXAMPLES, FinishedPart, PartJob, make_part
from axsparse.data.prepare.processes import in_order
from axsparse.data.prepare.request import (
    Request,
    Settings,
    check_request,
    request_key,
    settings_of,
)
from axsparse.data.prepare.text_sources import Part, Sources, bytes_of, cut, find_sources
from axsparse.data.prepare.tokenizers import Tokenizer, TokenizerChoice, open_tokenizer
from axsparse.data.prepare.vocabulary import choose_tokenizer
from axsparse.data.prepare.whole_files import (
    copy_file,
    digest_of,
    locked,
    new_file,
    remove_unfinished,
    writes,
)
from axsparse.data.token_file import (
    FORMAT,
    SIDECAR,
    TOKENIZER,
    Sidecar,
    SourceCounts,
    Split,
    SplitRecord,
    TokenFormat,
    dtype_for,
    read_sidecar,
    sample_digest,
    token_path,
)
from axsparse.runtime.console import Console, format_bytes, format_count, format_seconds
from axsparse.runtime.errors import DataError, OutputError
from axsparse.runtime.version import __version__

PARTS = "parts-"
"""Prefix of the names of folders that hold finished parts."""
MEGABYTE = 1_000_000
BEGINNING = 24
"""Number of tokens that are shown as text."""
SHOWN = 10
"""Number of left-out documents that are shown on the screen."""


def prepare(request: Request, workers: int, console: Console) -> Sidecar:
    """Carry out a request; returns the contents of tokens.json.

    An interrupted run of the same request is continued. If the folder holds the finished
    tokens of this request already, only their digests are checked.

    Raises ConfigError, DataError, MissingInputError, OutputError, and TrainingError if a
    worker is killed; parts that are finished stay for the next run.
    """
    began = time.monotonic()
    check_request(request)
    out = request.out
    with writes(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out) as is_locked:
        if not is_locked:
            console.line(f"{out}: no locks on this file system; let no other run prepare here")
        found = find_sources(request.inputs, request.validation, out, request.wanted)
        settings = settings_of(request)
        key = request_key(settings, found)
        if (out / SIDECAR).exists():
            sidecar = _finished(out, key)
            console.line(f"{out / SIDECAR}: already prepared from these files, and unharmed")
        else:
            sidecar = _Run(request, workers, console, settings, key).make(found)
            console.line(_rate(sidecar, time.monotonic() - began))
        _remove_parts(out)
        return sidecar


def _finished(out: Path, key: str) -> Sidecar:
    """The tokens.json of a finished folder.

    Raises OutputError if it belongs to another request, DataError if a file has changed.
    """
    sidecar = read_sidecar(out, "--out")
    if sidecar.request != key:
        raise OutputError(
            f"--out: {out} holds tokens of other files or settings; choose another folder, or "
            "remove this one"
        )
    for split, record in sidecar.splits():
        path = token_path(out, split)
        if not path.is_file() or digest_of(path) != record.digest:
            raise DataError(
                f"--out: {path} is not what was prepared; remove {out} and prepare it again"
            )
    return sidecar


def _remove_parts(out: Path, but: Path | None = None) -> bool:
    """Remove all folders of parts but one; returns whether there were any."""
    folders = [path for path in out.glob(f"{PARTS}*") if path != but]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(folders)


def _rate(sidecar: Sidecar, seconds: float) -> str:
    size = sidecar.sources.bytes
    return f"{format_bytes(size)} in {format_seconds(seconds)} · {format_bytes(size / seconds)}/s"


class _Run:
    """The making of one folder of tokens, from sources to tokens.json."""

    def __init__(
        self, request: Request, workers: int, console: Console, settings: Settings, key: str
    ) -> None:
        self._request = request
        self._workers = workers
        self._console = console
        self._settings = settings
        self._key = key
        self._folder = request.out / f"{PARTS}{key}"

    def make(self, found: Sources) -> Sidecar:
        request = self._request
        self._clear_leftovers()
        parts, sources = cut(found, request.reading, request.part_bytes)
        self._announce(parts, sources)
        choice = choose_tokenizer(request, parts, self._folder, self._workers, self._console)
        tokenizer = open_tokenizer(choice)
        form = TokenFormat(dtype_for(tokenizer.vocab_size), tokenizer.separator)
        fraction = request.validation_fraction
        jobs = [
            PartJob(number, part, self._folder, choice, form, request.reading, fraction)
            for number, part in enumerate(parts)
        ]
        merged = merge(
            self._watched(in_order(make_part, jobs, self._workers), bytes_of(parts)),
            request.out,
            request.splits,
            form=form,
            max_line=request.reading.max_line,
            unreadable=sources.unreadable,
        )
        self._report(merged)
        self._show_beginning(tokenizer, form)
        if choice.path is not None:
            copy_file(choice.path, request.out / TOKENIZER)
        counts = SourceCounts(
            files=len(sources.files),
            bytes=bytes_of(parts),
            left_out=merged.left_out,
            examples=merged.examples,
        )
        sidecar = self._sidecar(choice, form, merged, counts)
        with new_file(request.out / SIDECAR) as file:
            file.write(sidecar.model_dump_json(indent=2).encode() + b"\n")
        return sidecar

    def _clear_leftovers(self) -> None:
        """Make the folder of parts, and remove what killed runs and other requests left."""
        out = self._request.out
        if _remove_parts(out, but=self._folder):
            self._console.line("parts made from other files or with other settings were removed")
        with writes(self._folder):
            self._folder.mkdir(exist_ok=True)
        for folder in (out, self._folder):
            remove_unfinished(folder)

    def _announce(self, parts: Sequence[Part], sources: Sources) -> None:
        console = self._console
        console.line(
            f"{_count(len(sources.files), 'file')}, {format_bytes(bytes_of(parts))} · "
            f"{self._settings['tokenizer']} · {_count(self._workers, 'worker')} → "
            f"{self._request.out}"
        )
        if done := len(list(self._folder.glob("part-*.json"))):
            console.line(
                f"going on with {done} of {_count(len(parts), 'part')} from an earlier run"
            )

    def _sidecar(
        self,
        choice: TokenizerChoice,
        form: TokenFormat,
        merged: MergeResult,
        counts: SourceCounts,
    ) -> Sidecar:
        return Sidecar(
            version=FORMAT,
            axsparse=__version__,
            tokenizer=choice.record,
            vocab_size=open_tokenizer(choice).vocab_size,
            separator=form.separator,
            dtype=form.dtype,
            train=self._record("train", merged),
            validation=self._record("validation", merged)
            if "validation" in merged.splits
            else None,
            sources=counts,
            settings=self._settings,
            request=self._key,
        )

    def _record(self, split: Split, merged: MergeResult) -> SplitRecord:
        written = merged.splits[split]
        return SplitRecord(
            documents=written.documents,
            tokens=written.tokens,
            digest=written.digest,
            sample_digest=sample_digest(token_path(self._request.out, split)),
        )

    def _watched(self, parts: Iterator[FinishedPart], size: int) -> Iterator[FinishedPart]:
        """Passes the parts on and moves the progress bar; `size` is the bytes of all parts."""
        began, done, new = time.monotonic(), 0, 0
        for made in parts:
            yield made
            done += made.record.source_bytes
            new += 0 if made.kept else made.record.source_bytes
            seconds = time.monotonic() - began
            eta = (size - done) / new * seconds if new else 0.0
            self._console.progress(
                done // MEGABYTE,
                max(1, size // MEGABYTE),
                f"MB  {format_bytes(new / seconds)}/s  eta {format_seconds(eta)}",
            )

    def _show_beginning(self, tokenizer: Tokenizer, form: TokenFormat) -> None:
        """Show the first tokens as the text that they stand for, to be looked at."""
        ids = np.fromfile(token_path(self._request.out, "train"), form.dtype, BEGINNING).tolist()
        text = tokenizer.decode(ids[:BEGINNING])
        self._console.line(f"train begins with {len(ids)} tokens: {text!r}")

    def _report(self, merged: MergeResult) -> None:
        console = self._console
        if merged.left_out:
            total = sum(merged.left_out.values())
            reasons = ", ".join(f"{count} {name}" for name, count in merged.left_out.items())
            console.line(f"left out {_count(total, 'document')}: {reasons}")
            for example in merged.examples[:SHOWN]:
                console.line(f"  {example}")
            if total > SHOWN:
                console.line(f"  and {total - SHOWN} more; {SIDECAR} names the first {EXAMPLES}")
        for split, written in merged.splits.items():
            documents = _count(written.documents, "document")
            console.line(f"{split}: {documents}, {format_count(written.tokens)} tokens")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
