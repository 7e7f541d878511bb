"""What `axsparse data prepare` is asked to do, and the key that identifies a request.

Two runs whose keys are equal would write the same files, so that the second can use the parts
that the first has finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from axsparse.data.prepare.documents import Reading, Splitter
from axsparse.data.prepare.text_sources import ALL, Filter, Sources
from axsparse.data.prepare.tokenizers import (
    LEAST_BPE,
    SEPARATOR,
    check_readable,
    import_tokenizers,
    library_version,
)
from axsparse.data.prepare.whole_files import digest_of
from axsparse.data.token_file import FORMAT, Split
from axsparse.runtime.errors import ConfigError

Settings = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Request:
    """The text to prepare, the folder to write, and the settings.

    At most one of `train_bpe` and `tokenizer` is given; without either, tokens are bytes.
    """

    inputs: tuple[Path, ...]
    """Files and folders of text."""
    out: Path
    """The folder that receives the tokens."""
    wanted: Filter = ALL
    """Which files of folders are read."""
    validation: tuple[Path, ...] = ()
    """Files and folders whose documents form the validation part."""
    validation_fraction: float = 0.0
    """Fraction of the documents held out for validation, in [0, 1), instead of `validation`."""
    train_bpe: int | None = None
    """Vocabulary size of a byte-pair encoding that is learnt from the training documents."""
    bpe_sample_bytes: int = 64_000_000
    """Bytes of text that byte-pair encoding is learnt from, spread evenly over the sources."""
    tokenizer: Path | None = None
    """A tokenizer.json of Hugging Face's tokenizers library, applied as it is."""
    separator: str = SEPARATOR
    """The token of `tokenizer` that is written after each document."""
    reading: Reading = field(default_factory=Reading)
    part_bytes: int = 1 << 23
    """Bytes of text that a worker processes at a time."""

    @property
    def splits(self) -> tuple[Split, ...]:
        held_out = self.validation or self.validation_fraction > 0
        return ("train", "validation") if held_out else ("train",)


def check_request(request: Request) -> None:
    """Raise ConfigError or MissingInputError for a request that cannot be carried out.

    Only the tokenizer's file is opened for this.
    """
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


def settings_of(request: Request) -> Settings:
    """The settings that the tokens depend on; the sources are not among them."""
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


def request_key(settings: Settings, found: Sources) -> str:
    """Digest of the settings and of the paths, sizes and times of the sources."""
    digest = hashlib.blake2b(json.dumps([FORMAT, settings]).encode(), digest_size=16)
    for source in found.files:
        facts = (source.size, source.changed_ns, source.validation)
        digest.update(os.fsencode(source.path) + b"\0" + repr(facts).encode() + b"\0")
    return digest.hexdigest()
