"""Text files to memory-mapped tokens: the run of `axsparse data prepare`, restartable at any point.

Sources are cut into parts; each part becomes a file of tokens by itself; these are joined in
order. Finished parts lie in a folder named after the request until tokens.json is written,
so that a run which was killed goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from axsparse.data.prepare.documents import Reading, Splitter
from axsparse.data.prepare.merge import MergeResult, merge
from axsparse.data.prepare.part import (
    EXAMPLES,
    FinishedPart,
    PartJob,
    TokenizerChoice,
    falls_to_validation,
    make_part,
)
from axsparse.data.prepare.processes import apart, in_order
from axsparse.data.prepare.text_sources import Part, Sources, bytes_of, cut, find_sources, pieces_of
from axsparse.data.prepare.tokenizers import (
    LEAST_BPE,
    SEPARATOR,
    ByteTokenizer,
    check_readable,
    describe,
    import_tokenizers,
    library_version,
    train_bpe,
)
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
    dtype_for,
    read_sidecar,
    sample_digest,
    token_path,
)
from axsparse.runtime.console import Console, format_bytes, format_count, format_seconds
from axsparse.runtime.errors import ConfigError, DataError, OutputError
from axsparse.runtime.files.durable import sync_folder
from axsparse.runtime.version import __version__

Settings = dict[str, str | int | float | bool]
PARTS = "parts-"
"""Folders of finished parts begin with it."""
MEGABYTE = 1_000_000
SHOWN = 10
"""Documents left out that the screen names."""


@dataclass(frozen=True)
class Request:
    """What is to be prepared, and how."""

    inputs: tuple[Path, ...]
    out: Path
    validation: tuple[Path, ...] = ()
    """Files and folders of the validation part."""
    validation_fraction: float = 0.0
    """Fraction of the documents that is held out, if no validation files are named."""
    train_bpe: int | None = None
    """Vocabulary of byte-pair encoding to be learnt; None with `tokenizer` None takes bytes."""
    bpe_sample_bytes: int = 64_000_000
    """Text that byte-pair encoding is learnt from, evenly spread over the sources."""
    tokenizer: Path | None = None
    """File of a tokenizer."""
    separator: str = SEPARATOR
    """Its token between documents."""
    reading: Reading = field(default_factory=Reading)
    part_bytes: int = 1 << 23
    """Text that a worker takes at a time."""

    @property
    def splits(self) -> tuple[Split, ...]:
        held_out = self.validation or self.validation_fraction > 0
        return ("train", "validation") if held_out else ("train",)


def prepare(request: Request, workers: int, console: Console) -> Sidecar:
    """Prepare, go on with what was interrupted, or find that all is done.

    Raises ConfigError, DataError, MissingInputError, OutputError, and TrainingError if a
    worker is killed; what was finished stays for the next run.
    """
    began = time.monotonic()
    _check(request)
    out = request.out
    with writes(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out) as is_locked:
        if not is_locked:
            console.line(f"{out}: no locks on this file system; let no other run prepare here")
        found = find_sources(request.inputs, request.validation, out)
        settings = _settings(request)
        key = _key(settings, found)
        if (out / SIDECAR).exists():
            sidecar = _finished(out, key)
            console.line(f"{out / SIDECAR}: already prepared from these files, and unharmed")
        else:
            sidecar = _Run(request, workers, console, settings, key).make(found)
            console.line(_rate(sidecar, time.monotonic() - began))
        _remove_parts(out)
        return sidecar


def _check(request: Request) -> None:
    """The rules that need no file opened but the tokenizer's."""
    Splitter(request.reading.split_documents)
    if request.train_bpe is not None and request.train_bpe < LEAST_BPE:
        raise ConfigError(
            f"--train-bpe: {request.train_bpe} words are fewer than the 256 bytes and the "
            f"separator; choose at least {LEAST_BPE}"
        )
    if request.tokenizer is not None:
        check_readable(request.tokenizer)
    if request.train_bpe is not None or request.tokenizer is not None:
        import_tokenizers()
    out = request.out.resolve()
    for path in (*request.inputs, *request.validation):
        if path.resolve() == out or out in path.resolve().parents:
            raise ConfigError(
                f"--out: {path} would be read while {request.out} is written; choose a folder "
                "that holds no input"
            )


def _settings(request: Request) -> Settings:
    """What the tokens depend on beside the sources."""
    settings: Settings = {
        **dataclasses.asdict(request.reading),
        "validation_fraction": request.validation_fraction,
        "part_bytes": request.part_bytes,
        "tokenizer": "bytes",
    }
    if request.train_bpe is not None:
        settings |= {
            "tokenizer": f"bpe {request.train_bpe}",
            "bpe_sample_bytes": request.bpe_sample_bytes,
            "library": library_version(),
        }
    elif request.tokenizer is not None:
        settings |= {
            "tokenizer": f"file {digest_of(request.tokenizer)}",
            "separator": request.separator,
            "library": library_version(),
        }
    return settings


def _key(settings: Settings, found: Sources) -> str:
    """Digest of a request: equal ones can share parts."""
    digest = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=16)
    for source in found.files:
        facts = (source.size, source.changed_ns, source.validation)
        digest.update(os.fsencode(source.path) + b"\0" + repr(facts).encode() + b"\0")
    return digest.hexdigest()


def _finished(out: Path, key: str) -> Sidecar:
    """The sidecar of a folder that is done; an error if it is another's, or harmed."""
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
    """Whether there were parts; an earlier request's may be of no more use."""
    folders = [path for path in out.glob(f"{PARTS}*") if path != but]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(folders)


def _rate(sidecar: Sidecar, seconds: float) -> str:
    size = sidecar.sources.bytes
    return f"{format_bytes(size)} in {format_seconds(seconds)} · {format_bytes(size / seconds)}/s"


class _Run:
    """One preparation, from sources to tokens.json."""

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
        request, console = self._request, self._console
        if _remove_parts(request.out, but=self._folder):
            console.line("parts made from other files or with other settings were removed")
        with writes(self._folder):
            self._folder.mkdir(exist_ok=True)
        for folder in (request.out, self._folder):
            remove_unfinished(folder)
        parts, sources = cut(found, request.reading, request.part_bytes)
        size = bytes_of(parts)
        console.line(
            f"{_count(len(sources.files), 'file')}, {format_bytes(size)} · "
            f"{self._settings['tokenizer']} · {_count(self._workers, 'worker')} → {request.out}"
        )
        if done := len(list(self._folder.glob("part-*.json"))):
            console.line(
                f"going on with {done} of {_count(len(parts), 'part')} from an earlier run"
            )
        choice = self._choose_tokenizer(parts, size)
        tokenizer = choice.open()
        dtype = dtype_for(tokenizer.vocab_size)
        fraction = request.validation_fraction
        jobs = [
            PartJob(number, part, self._folder, choice, dtype, request.reading, fraction)
            for number, part in enumerate(parts)
        ]
        merged = merge(
            self._watched(in_order(make_part, jobs, self._workers), size),
            request.out,
            request.splits,
            separator=tokenizer.separator,
            dtype=dtype,
            max_line=request.reading.max_line,
            unreadable=sources.unreadable,
        )
        self._report(merged)
        if choice.path is not None:
            copy_file(choice.path, request.out / TOKENIZER)
        sidecar = Sidecar(
            version=FORMAT,
            axsparse=__version__,
            tokenizer=tokenizer.record,
            vocab_size=tokenizer.vocab_size,
            separator=tokenizer.separator,
            dtype=dtype,
            train=self._record("train", merged),
            validation=self._record("validation", merged)
            if "validation" in merged.splits
            else None,
            sources=SourceCounts(
                files=len(sources.files),
                bytes=size,
                left_out=merged.left_out,
                examples=merged.examples,
            ),
            settings=self._settings,
            request=self._key,
        )
        with new_file(request.out / SIDECAR) as file:
            file.write(sidecar.model_dump_json(indent=2).encode() + b"\n")
        return sidecar

    def _record(self, split: Split, merged: MergeResult) -> SplitRecord:
        written = merged.splits[split]
        return SplitRecord(
            documents=written.documents,
            tokens=written.tokens,
            digest=written.digest,
            sample_digest=sample_digest(token_path(self._request.out, split)),
        )

    def _choose_tokenizer(self, parts: Sequence[Part], size: int) -> TokenizerChoice:
        """The tokenizer's file in the folder of parts, learnt or copied there if need be."""
        request = self._request
        if request.train_bpe is not None:
            path = self._learnt() or self._learn(parts, size, request.train_bpe)
            return TokenizerChoice(path, describe(path, "bpe"), SEPARATOR)
        if request.tokenizer is not None:
            path = self._folder / TOKENIZER
            copy_file(request.tokenizer, path)
            return TokenizerChoice(path, describe(path, "file"), request.separator)
        return TokenizerChoice(None, ByteTokenizer.record, "")

    def _learnt(self) -> Path | None:
        """What an earlier run learnt; the name of the file tells its digest."""
        for path in self._folder.glob("tokenizer-*.json"):
            if path.stem == f"tokenizer-{digest_of(path)}":
                return path
            path.unlink()
        return None

    def _learn(self, parts: Sequence[Part], size: int, vocab_size: int) -> Path:
        request, began = self._request, time.monotonic()
        sample = min(size, request.bpe_sample_bytes)
        self._console.line(f"learning {vocab_size:,} words from {format_bytes(sample)} …")
        path = self._folder / TOKENIZER
        job = BpeJob(
            tuple(parts),
            request.reading,
            request.validation_fraction,
            min(1.0, request.bpe_sample_bytes / max(1, size)),
            vocab_size,
            path,
            self._workers,
        )
        # Apart, so that its memory goes back to the system.
        apart(learn_bpe, job)
        learnt = path.rename(path.with_name(f"tokenizer-{digest_of(path)}.json"))
        sync_folder(self._folder)
        self._console.line(f"learnt in {format_seconds(time.monotonic() - began)}")
        return learnt

    def _watched(self, parts: Iterator[FinishedPart], size: int) -> Iterator[FinishedPart]:
        """The same parts, with the bar moving along."""
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


@dataclass(frozen=True)
class BpeJob:
    """What byte-pair encoding is learnt from."""

    parts: tuple[Part, ...]
    reading: Reading
    validation_fraction: float
    share: float
    """Of each part, from its beginning."""
    vocab_size: int
    path: Path
    threads: int


def learn_bpe(job: BpeJob) -> None:
    """Learn from a share of the training documents; in a process that does nothing else."""
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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
