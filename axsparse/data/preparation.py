"""`axsparse data prepare`: text files become memory-mapped tokens; a killed run can be continued.

Documents are read one after the other, encoded in batches by the threads of the tokenizers library,
and appended to one file of tokens for each split. These files lie in a folder named after the
request, next to a record of how far they are, until all is done; tokens.json is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from axsparse.data.chats import ASSISTANT, WEIGHT, WHY, Chat, ChatTemplate, common_prefix
from axsparse.data.documents import (
    READERS,
    STRETCH,
    Completion,
    Content,
    DocumentSource,
    Piece,
    Reading,
    divider,
    documents,
    find_sources,
    first_contents,
    has_marks,
    read_text,
)
from axsparse.data.token_file import (
    DISTINCT,
    FORMAT,
    SIDECAR,
    TOKENIZER,
    Sidecar,
    SourceCounts,
    Split,
    SplitRecord,
    TokenizerRecord,
    digest_of,
    dtype_for,
    id_facts,
    mark_of,
    read_sidecar,
    sample_digest,
    stored,
    token_path,
)
from axsparse.data.tokenizers import (
    LEAST_BPE,
    OVERLAP,
    SEPARATOR,
    ByteTokenizer,
    GivenTokenizer,
    LongText,
    Subwords,
    Tokenizer,
    Tokens,
    given_tokenizer,
    library_version,
    set_threads,
    train_bpe,
)
from axsparse.runtime.console import Console, format_bytes, format_count, format_seconds
from axsparse.runtime.errors import ConfigError, DataError, OutputError, reading, writing
from axsparse.runtime.files.atomic import UNFINISHED, new_path
from axsparse.runtime.files.run_folder import RunLock
from axsparse.runtime.provenance import __version__
from axsparse.runtime.stop_signal import handle_interrupt

PROGRESS = "progress.json"
PARTIAL = "parts-"
"""Prefix of the name of the folder in which a request is carried out; `_key` follows."""
PARTS = PARTIAL + 32 * "[0-9a-f]"
BATCH = 1 << 20
"""Characters that are encoded at a time, by all threads together."""
SAVED = 64
"""Batches after which the files of tokens are put on the disk and their progress is recorded, at
the next end of a document."""
EXAMPLES = 20
"""Left-out documents that are named; all of them are counted."""
BEGINNING = 24
"""Number of tokens that are shown as text."""
MEGABYTE = 1_000_000
LATE = "a chat, a prompt or labels, and none among the first documents"
"""Why a document cannot be used that has tokens that are no targets, where files have no marks."""

Settings = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Request:
    """At most one of `train_bpe` and `tokenizer` is given; without either, tokens are bytes."""

    inputs: tuple[Path, ...]
    out: Path
    written: tuple[Path, ...] = ()
    """Other folders that are written to, and therefore not read."""
    validation: tuple[Path, ...] = ()
    """Files and folders whose documents form the validation part."""
    validation_fraction: float = 0.0
    """Fraction of the documents held out for validation, in [0, 1), instead of `validation`. Where
    that leaves a split without documents, it is the fraction of the tokens, the last ones."""
    train_bpe: int | None = None
    """Vocabulary size of a byte-pair encoding that is learnt from the training documents."""
    bpe_sample_bytes: int = 64_000_000
    """Text that byte-pair encoding is learnt from, spread evenly over the sources."""
    tokenizer: Path | None = None
    """A Hugging Face folder, or a tokenizer.json, with the settings next to it."""
    separator: str | None = None
    """The token of `tokenizer` that is written after each document; None: its own end of a text,
    else `SEPARATOR`."""
    reading: Reading = field(default_factory=Reading)

    @property
    def splits(self) -> tuple[Split, ...]:
        held_out = self.validation or self.validation_fraction > 0
        return ("train", "validation") if held_out else ("train",)


class PreparationProgress(BaseModel):
    """How many pieces of documents have been read, and what is in each file of tokens, separators
    included."""

    pieces: int = 0
    documents: dict[Split, int]
    tokens: dict[Split, int]
    left_out: dict[str, int] = {}
    """Number of documents left out, by reason."""
    examples: list[str] = []
    """The first of these: file, line at which the document begins, reason."""
    choices: dict[str, int] = {}
    """Number of records that could be several documents, by what was taken and left out."""

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.left_out.items())

    def leave_out(self, place: str, problem: str) -> None:
        """Count a document that cannot be used, by its reason without the part in brackets."""
        kind = problem.partition(" (")[0]
        self.left_out[kind] = self.left_out.get(kind, 0) + 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{place}: {problem}")


def prepare(request: Request, threads: int, console: Console) -> Sidecar:
    """Carry out a request; returns the contents of tokens.json.

    An interrupted run of the same request is continued. If the folder holds the finished
    tokens of this request already, only their digests are checked. `threads` encode and learn,
    where tokens are not bytes; the tokens do not depend on their number.

    Raises ConfigError, DataError, MissingInputError and OutputError.
    """
    began = time.monotonic()
    given = None if request.tokenizer is None else given_tokenizer(request.tokenizer)
    settings = _settings(request, given)
    out = request.out
    with writing(f"--out: {out}", "free the disk, or choose another place"):
        out.mkdir(parents=True, exist_ok=True)
        lock = RunLock(out, "--out", ".lock")
        with contextlib.ExitStack() as held:
            held.callback(lock.release)
            try:
                sources, left_out = find_sources(
                    request.inputs, request.validation, out, *request.written
                )
                _reject_unused(request, sources)
                firsts = [*first_contents(sources, request.reading)]
            except OSError as reason:  # not of the place that is written
                with reading(f"{reason.filename or out}:", "name another input"):
                    raise
            chats = [content for content in firsts if isinstance(content, Chat)]
            template = ChatTemplate(given) if chats else None
            if template is not None:
                settings["chat_template"] = template.digest
            if any(map(has_marks, firsts)):
                settings["marked"] = True
            key = _key(settings, sources)
            if (out / SIDECAR).exists():
                sidecar = _finished(out, key)
                console.line(f"{out / SIDECAR}: already prepared from these files, and unharmed")
            else:
                _reject_foreign(request)
                folder, marked = out / f"{PARTIAL}{key}", "marked" in settings
                run = _Run(request, sources, folder, console, given, template, chats, marked)
                files = f"{_count(len(sources), 'file')}, {format_bytes(run.size)}"
                console.line(f"{files} · {settings['tokenizer']} → {out}")
                set_threads(threads)
                sidecar = run.make(left_out, settings, key)
                seconds = time.monotonic() - began
                speed = format_bytes(run.size / seconds)
                console.line(f"{format_bytes(run.size)} in {format_seconds(seconds)} · {speed}/s")
            for folder in out.glob(PARTS):
                shutil.rmtree(folder, ignore_errors=True)
    return sidecar


def _settings(request: Request, given: GivenTokenizer | None) -> Settings:
    """The settings that the tokens depend on, beside the sources."""
    divider(request.reading.split_documents)
    out = Path(os.path.realpath(request.out))
    for path in (*request.inputs, *request.validation):
        real = Path(os.path.realpath(path))
        if real == out or out in real.parents:
            raise ConfigError(
                f"--out: {path} would be read while {request.out} is written; choose a folder "
                "that holds no input"
            )
    settings: Settings = {
        "split_documents": request.reading.split_documents,
        "jsonl_field": request.reading.jsonl_field,
        "max_line": request.reading.max_line,
        "validation_fraction": request.validation_fraction,
        "part_bytes": STRETCH,
        "tokenizer": "bytes",
    }
    if request.train_bpe is not None:
        if request.train_bpe < LEAST_BPE:
            raise ConfigError(
                f"--train-bpe: {request.train_bpe} words are fewer than the 256 bytes and the "
                f"separator; choose at least {LEAST_BPE}"
            )
        settings |= {
            "tokenizer": f"bpe {request.train_bpe}",
            "bpe_sample_bytes": request.bpe_sample_bytes,
            "library": library_version(),
        }
    elif given is not None:
        end = given.end or SEPARATOR
        settings |= {
            "tokenizer": f"file {hashlib.blake2b(given.json, digest_size=16).hexdigest()}",
            "separator": end if request.separator is None else request.separator,
            "split_special_tokens": given.split_special_tokens,
            "library": library_version(),
        }
    return settings


def _reject_unused(request: Request, sources: Sequence[DocumentSource]) -> None:
    """ConfigError for an option of which the rest of the request makes no use."""
    reading, are_text = request.reading, [source.reader is read_text for source in sources]
    separator, sample = request.separator, request.bpe_sample_bytes
    unused = {
        "--separator: goes with --tokenizer": request.tokenizer is None
        and separator not in (None, SEPARATOR),
        "--bpe-sample-mb: goes with --train-bpe": request.train_bpe is None
        and sample != Request.bpe_sample_bytes,
        "--split-documents: divides text files, and the input has none": not any(are_text)
        and reading.split_documents != Reading.split_documents,
        "--jsonl-field: names a key of records, and the input has none (files that end in .jsonl, "
        ".json, .parquet or .arrow)": all(are_text) and reading.jsonl_field != Reading.jsonl_field,
        "--max-line-mb: bounds lines, and the input has tables alone": reading.max_line
        != Reading.max_line
        and all(source.reader in map(READERS.get, (".parquet", ".arrow")) for source in sources),
    }
    found = [line for line, is_so in unused.items() if is_so]
    if found and sources:
        raise ConfigError(f"{found[0]}; leave it out")


def _key(settings: Settings, sources: Sequence[DocumentSource]) -> str:
    """Digest of all that decides what is written: settings, paths, sizes and times of sources."""
    digest = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=16)
    for source in sources:
        facts = (source.size, source.changed_ns, source.validation)
        digest.update(os.fsencode(source.path) + b"\0" + repr(facts).encode() + b"\0")
    return digest.hexdigest()


def _finished(out: Path, key: str) -> Sidecar:
    """The tokens.json of a finished folder, which has to be of this request and unchanged."""
    try:
        sidecar = read_sidecar(out, "--out")
    except DataError as reason:
        raise _not_ours(out, [SIDECAR]) from reason
    if sidecar.request != key:
        raise OutputError(
            f"--out: {out} holds tokens of other files or settings; choose another folder, or "
            "remove this one"
        )
    digests = {token_path(out, split): record.digest for split, record in sidecar.splits()}
    if sidecar.tokenizer.digest:
        digests[out / TOKENIZER] = sidecar.tokenizer.digest
    for path, digest in digests.items():
        if not path.is_file() or digest_of(path) != digest:
            raise DataError(
                f"--out: {path} is not what was prepared; remove {out} and prepare it again"
            )
    return sidecar


def _reject_foreign(request: Request) -> None:
    """OutputError if files would be replaced that no preparation has written: its own come with a
    tokens.json, or with the folder of a preparation that was killed."""
    out, names = request.out, [token_path(request.out, split).name for split in request.splits]
    if request.train_bpe is not None or request.tokenizer is not None:
        names.append(TOKENIZER)
    found = [name for name in names if os.path.lexists(out / name)]
    if found and not any(out.glob(PARTS)):
        raise _not_ours(out, found)


def _not_ours(out: Path, names: Sequence[str]) -> OutputError:
    return OutputError(
        f"--out: {out} has {' and '.join(names)} that `axsparse data prepare` has not written or "
        "not finished, and it replaces nothing there; choose another folder"
    )


@dataclass
class _Run:
    """The making of one folder of tokens, from sources to tokens.json."""

    request: Request
    sources: Sequence[DocumentSource]
    folder: Path
    """For unfinished files; it may have the files of an earlier run."""
    console: Console
    given: GivenTokenizer | None
    template: ChatTemplate | None
    first_chats: Sequence[Chat]
    marked: bool
    """Whether tokens may be no targets."""

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)

    def make(self, left_out: Sequence[tuple[str, str]], settings: Settings, key: str) -> Sidecar:
        """Write all files. `left_out` names files and folders that are not read, and why."""
        request, folder = self.request, self.folder
        folder.mkdir(exist_ok=True)
        for other in request.out.glob(PARTS):
            if other != folder:
                shutil.rmtree(other)
        for killed in (*request.out.glob(f"*{UNFINISHED}*"), *folder.glob(f"*{UNFINISHED}*")):
            killed.unlink()
        tokenizer = self._tokenizer(str(settings.get("separator", SEPARATOR)))
        encoder = _Encoder(tokenizer, self.template, marked=self.marked)
        progress = self._write(encoder, left_out)
        _reject_empty(progress, request)
        documents = sum(progress.documents.values())
        if request.validation_fraction and not all(progress.documents.values()):
            self._hold_out_end(progress, encoder.dtype)
        paths = [token_path(folder, split) for split in request.splits]
        facts = [id_facts(path, encoder.dtype, encoder.mark, tokenizer.separator) for path in paths]
        inner = sum(ends for _, ends in facts) - documents
        records = {
            split: SplitRecord(
                documents=progress.documents[split],
                tokens=progress.tokens[split],
                digest=digest_of(path),
                sample_digest=sample_digest(path),
            )
            for split, path in zip(request.splits, paths, strict=True)
        }
        for path in (*paths, folder / TOKENIZER):
            if path.exists():
                path.replace(request.out / path.name)
        self._report(progress, encoder, inner)
        sidecar = Sidecar(
            version=FORMAT,
            axsparse=__version__,
            tokenizer=tokenizer.record,
            vocab_size=tokenizer.vocab_size,
            largest_id=max(largest for largest, _ in facts),
            separator=tokenizer.separator,
            inner_separators=inner,
            dtype=dtype_for(tokenizer.vocab_size, marked=self.marked),
            marked=self.marked,
            chat_template="" if self.template is None else self.template.templates,
            chat_ends=() if self.template is None else self.template.ends(self.first_chats),
            train=records["train"],
            validation=records.get("validation"),
            sources=SourceCounts(
                files=len(self.sources),
                bytes=self.size,
                left_out=progress.left_out,
                examples=tuple(progress.examples),
            ),
            settings=settings,
            request=key,
        )
        # Writing this file also puts the names of the others on the disk.
        _write_file(request.out / SIDECAR, sidecar.model_dump_json(indent=2).encode() + b"\n")
        return sidecar

    def _tokenizer(self, separator: str) -> Tokenizer:
        """The tokenizer that is asked for, by its file in the folder, if it has one."""
        request, path = self.request, self.folder / TOKENIZER
        if request.train_bpe is None and self.given is None:
            return ByteTokenizer()
        if self.given is not None:
            _write_file(path, self.given.json)
        elif request.train_bpe is not None and not path.exists():  # else an earlier run learnt it
            sample = format_bytes(min(self.size, request.bpe_sample_bytes))
            self.console.line(f"learning {request.train_bpe:,} words from {sample} …")
            before = signal.getsignal(signal.SIGINT)
            handle_interrupt(signal.SIG_DFL)  # Python's own handler would wait for the library
            learnt = train_bpe(self._sample(), request.train_bpe)
            handle_interrupt(before)
            _write_file(path, learnt)
        record = TokenizerRecord(
            kind="bpe" if self.given is None else "file",
            digest=digest_of(path),
            library=library_version(),
            split_special_tokens=self.given is not None and self.given.split_special_tokens,
        )
        return Subwords(path, record, separator, given=request.tokenizer)

    def _sample(self) -> Iterator[str]:
        """A share of the training documents, spread evenly, to learn a vocabulary from."""
        share = self.request.bpe_sample_bytes / max(1, self.size)
        seen = given = 0
        for piece, _ in self._pieces():
            content = piece.content
            text = "".join(content) if isinstance(content, Completion) else piece.text
            if text and piece.problem is None and not piece.validation:
                if given <= share * seen:
                    yield text
                    given += len(text)
                seen += len(text)

    def _pieces(self) -> Iterator[tuple[Piece, int]]:
        """The pieces of all documents, and how many bytes of all files were read up to each."""
        request, before = self.request, 0
        for source in self.sources:
            for piece in documents(source, request.reading, request.validation_fraction):
                yield piece, before + piece.read
            before += source.size

    def _write(self, encoder: _Encoder, left_out: Sequence[tuple[str, str]]) -> PreparationProgress:
        """Write the files of tokens into the folder, continuing where an earlier run was."""
        with contextlib.ExitStack() as files:
            writer = _Writer(self.folder, self.request.splits, encoder, files)
            progress = writer.progress
            if progress.pieces:
                done = _count(sum(progress.documents.values()), "document")
                self.console.line(f"going on after {done} from an earlier run")
            else:
                for name, why in left_out:
                    progress.leave_out(name, why)
            began, skipped = time.monotonic(), None
            rest = islice(self._pieces(), progress.pieces, None)
            for batch in _batches(rest):
                writer.add([piece for piece, _ in batch])
                read = batch[-1][1]
                skipped = batch[0][1] if skipped is None else skipped
                speed = max(1, read - skipped) / (time.monotonic() - began)
                eta = format_seconds((self.size - read) / speed)
                part = (read // MEGABYTE, max(1, self.size // MEGABYTE))
                self.console.progress(*part, f"MB  {format_bytes(speed)}/s  eta {eta}")
            writer.save()
            return progress

    def _hold_out_end(self, progress: PreparationProgress, dtype: np.dtype[Any]) -> None:
        """Divide the tokens where all documents fell to one split: the last ones are validation."""
        fraction, count = self.request.validation_fraction, sum(progress.tokens.values())
        held = min(count - 1, max(1, round(fraction * count)))
        documents = sum(progress.documents.values())
        train, validation = (token_path(self.folder, split) for split in ("train", "validation"))
        if not progress.documents["train"]:
            validation.replace(train)
        with train.open("r+b") as whole, validation.open("wb") as end:
            whole.seek((count - held) * dtype.itemsize)
            shutil.copyfileobj(whole, end)
            whole.truncate((count - held) * dtype.itemsize)
        progress.tokens = {"train": count - held, "validation": held}
        progress.documents = {"train": documents, "validation": 1}
        self.console.line(
            f"{_count(documents, 'document')} cannot be shared out by {fraction:g}: validation has "
            f"the last {format_count(held)} tokens of all"
        )

    def _report(self, progress: PreparationProgress, encoder: _Encoder, inner: int) -> None:
        """Report the left out and the written documents, and show the first tokens as text; `inner`
        separators are within documents."""
        console, tokenizer = self.console, encoder.tokenizer
        if progress.left_out:
            total = sum(progress.left_out.values())
            console.line(f"left out {_count(total, 'document')}: {progress.reasons}")
            for example in progress.examples:
                console.line(f"  {example}")
            if total > EXAMPLES:
                console.line(f"  and {total - EXAMPLES} more")
        for choice, number in progress.choices.items():
            console.line(
                f"{_count(number, 'record')} with several contents: {choice}; `axsparse data "
                "prepare --jsonl-field KEY` takes another"
            )
        for split, tokens in progress.tokens.items():
            count = _count(progress.documents[split], "document")
            console.line(f"{split}: {count}, {format_count(tokens)} tokens")
        ids = np.fromfile(token_path(self.request.out, "train"), encoder.dtype, BEGINNING)
        ids = (ids & ~encoder.dtype.type(encoder.mark)).tolist()
        console.line(f"train begins with {len(ids)} tokens: {tokenizer.decode(ids)!r}")
        if inner:
            end = tokenizer.decode([tokenizer.separator])
            console.line(
                f"{end!r} ends documents, and is {_count(inner, 'time')} within them, as of a "
                f"chat template; {DISTINCT} for data.intra_document_attention"
            )


class _Encoder:
    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, marked: bool
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._long_text: LongText | None = None
        """The text of a document that has not ended yet."""
        self.dtype = stored(dtype_for(tokenizer.vocab_size, marked=marked))
        self.mark = mark_of(self.dtype) if marked else 0
        """The offset added to the ids of tokens that are no targets."""

    def encode(self, batch: Sequence[Piece]) -> Iterator[tuple[Tokens, str | None]]:
        """The ids of each piece, and why its document cannot be used, if that is so."""
        for piece, ids in zip(batch, self._texts(batch), strict=True):
            if piece.content is None or piece.problem is not None:
                yield ids, piece.problem
                continue
            found = self._content(piece.content)
            yield (ids, found) if isinstance(found, str) else (found, None)

    def _content(self, content: Content) -> Tokens | str:
        """The ids of a document that is no text, or why it cannot be used."""
        if has_marks(content) and not self.mark:
            return LATE
        if isinstance(content, Chat):
            encoded = LATE if self._template is None else self._template.encode(content)
            if isinstance(encoded, str):
                return encoded
            ids, counts = np.array(encoded.ids, np.int64), np.array(encoded.counts, np.bool_)
            if not counts.any():
                if any(one.get(WEIGHT) == 0 for one in content.messages):
                    return f"a chat whose answers have a {WEIGHT} of 0"
                roles = dict.fromkeys(repr(one.get("role")) for one in content.messages)
                found = ", ".join(roles)[:WHY]
                return f"a chat without words of role {ASSISTANT!r} (its roles: {found})"
        elif isinstance(content, Completion):
            # It begins at the first id that differs from those of the prompt alone, as in TRL.
            texts = [content.prompt, content.prompt + content.completion]
            prompt, whole = self.tokenizer.encode_batch(texts)
            ids = np.concatenate([self.tokenizer.first, whole]).astype(np.int64)
            begin = self.tokenizer.first.size + common_prefix(prompt.tolist(), whole.tolist())
            counts = np.arange(ids.size) >= begin
        else:
            given = np.array(content)
            if given.dtype.kind != "i":
                return "ids beyond the vocabulary"
            ids, counts = np.where(given < 0, -1 - given, given), given >= 0
        if not ids.size:
            return "empty"
        if ids.max() >= self.tokenizer.vocab_size:
            return "ids beyond the vocabulary"
        return np.where(counts, ids, ids | self.mark).astype(self.dtype)

    def _texts(self, batch: Sequence[Piece]) -> Iterator[Tokens]:
        """The ids of the text of each piece; of a document in several, those that are sure."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            yield from tokenizer.encode_batch([piece.text for piece in batch])
            return
        is_long, tails, texts = [], [], []
        tail = None if self._long_text is None else self._long_text.tail
        for piece in batch:
            tails.append(tail or "")
            texts.append(tails[-1] + piece.text)
            is_long.append(tail is not None or not piece.ends)
            tail = None if piece.ends else texts[-1][-OVERLAP:]
        encoded = tokenizer.encode_batch([*tails, *texts])
        for piece, so, *ids in zip(
            batch, is_long, encoded[: len(batch)], encoded[len(batch) :], strict=True
        ):
            if not so:
                yield ids[1]
                continue
            text = self._long_text or LongText(tokenizer)
            sure = text.add(piece.text, *ids)
            self._long_text = None if piece.ends else text
            yield np.concatenate([sure, text.end()]) if piece.ends else sure

    def begin(self, piece: Piece) -> Tokens:
        """The ids before the first piece of a document: a text's own first tokens."""
        return self.tokenizer.first if piece.content is None else np.zeros(0, self.dtype)

    def end(self, piece: Piece, ids: Tokens) -> Tokens:
        """The ids after the last piece of a document: a text's own last tokens and the separator,
        unless they or the given ids end with it; no target, where the document marks its
        targets."""
        separator = self.tokenizer.separator
        is_text = piece.content is None or isinstance(piece.content, Completion)
        last = self.tokenizer.last.tolist() if is_text else []
        before = last or [int(ids[-1]) & ~self.mark] if ids.size else last
        if before[-1:] != [separator]:
            is_target = is_text or not has_marks(piece.content)
            last.append(separator if is_target else separator | self.mark)
        return np.array(last, self.dtype)


class _Writer:
    def __init__(
        self, folder: Path, splits: Sequence[Split], encoder: _Encoder, files: contextlib.ExitStack
    ) -> None:
        """Opens the files, which `files` closes, at the progress that was recorded last."""
        self._path = folder / PROGRESS
        self._encoder = encoder
        self._dtype = encoder.dtype
        paths = {split: token_path(folder, split) for split in splits}
        for path in paths.values():
            path.touch()
        self._files = {
            split: files.enter_context(path.open("r+b")) for split, path in paths.items()
        }
        zeros = dict.fromkeys(splits, 0)
        self.progress = PreparationProgress(documents=zeros, tokens=dict(zeros))
        try:
            earlier = PreparationProgress.model_validate_json(self._path.read_bytes())
            sizes = {split: path.stat().st_size for split, path in paths.items()}
            if all(sizes[split] >= self._bytes(count) for split, count in earlier.tokens.items()):
                self.progress = earlier
        except (OSError, ValidationError):
            pass  # There is no record, or it is damaged: the files are written again.
        for split, count in self.progress.tokens.items():
            self._split(split, count)
        self._begin: int | None = None
        """The token of its file at which the document begins whose end has not been read yet."""
        self._problem: str | None = None
        """Why that document will be left out."""
        self._unsaved_batches = 0

    def add(self, batch: Sequence[Piece]) -> None:
        for piece, (ids, problem) in zip(batch, self._encoder.encode(batch), strict=True):
            self._append(piece, ids, problem)
        self._unsaved_batches += 1

    def save(self) -> None:
        """Put the files on the disk, then the record of how far they are, between documents."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        _write_file(self._path, self.progress.model_dump_json().encode())
        self._unsaved_batches = 0

    def _append(self, piece: Piece, ids: Tokens, problem: str | None) -> None:
        progress = self.progress
        split: Split = "validation" if piece.validation else "train"
        progress.pieces += 1
        if self._begin is None:
            self._begin, self._problem = progress.tokens[split], None
            self._write(split, self._encoder.begin(piece))
        self._problem = self._problem or problem
        self._write(split, ids)
        if not piece.ends:
            return
        if self._problem is not None:
            self._split(split, self._begin)
            progress.leave_out(piece.place, self._problem)
        else:
            self._write(split, self._encoder.end(piece, ids))
            progress.documents[split] += 1
            if piece.choice:
                progress.choices[piece.choice] = progress.choices.get(piece.choice, 0) + 1
        self._begin = None
        if self._unsaved_batches >= SAVED:
            self.save()

    def _write(self, split: Split, ids: Tokens) -> None:
        self._files[split].write(np.ascontiguousarray(ids, self._dtype).data)
        self.progress.tokens[split] += len(ids)

    def _split(self, split: Split, tokens: int) -> None:
        """Let a file end after this many tokens."""
        self._files[split].seek(self._bytes(tokens))
        self._files[split].truncate()
        self.progress.tokens[split] = tokens

    def _bytes(self, tokens: int) -> int:
        return tokens * self._dtype.itemsize


def _batches(pieces: Iterable[tuple[Piece, int]]) -> Iterator[list[tuple[Piece, int]]]:
    """The pieces in lists of about `BATCH` characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        # Many empty documents, such as unusable ones, fill a batch as well.
        content = piece[0].content or ""
        about = len(content if isinstance(content, list) else str(content))
        size += 1 + len(piece[0].text) + about
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _reject_empty(progress: PreparationProgress, request: Request) -> None:
    """DataError if there is no document, or none in named validation files."""
    documents = sum(progress.documents.values())
    why, way = progress.reasons or "there is none", ""
    if progress.examples:
        why, way = f"{why}; the first: {progress.examples[0]}", "correct it"
    if documents == 0:
        way = way or "name UTF-8 text files, or JSONL, Parquet or Arrow files with --jsonl-field"
        raise DataError(f"input: no document can be used ({why}); {way}")
    for split, count in progress.documents.items():
        if count == 0 and request.validation:
            left = f", and others cannot be used ({why})" if way else ""
            way = way or (
                "name files by --validation that have documents, and others than those that are "
                "trained on"
            )
            raise DataError(
                f"{split}: none of the {_count(documents, 'document')} is of it{left}; {way}"
            )
    if documents and sum(progress.tokens.values()) < 2:
        raise DataError("input: a single token is in it, which has no next one; name more texts")


def _write_file(path: Path, content: bytes) -> None:
    with new_path(path) as unfinished:
        unfinished.write_bytes(content)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
