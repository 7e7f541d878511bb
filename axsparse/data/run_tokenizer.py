"""The tokenizer that a run's data were made with, for texts that its model continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from axsparse.data.prepare.tokenizers import SEPARATOR, ByteTokenizer, Subwords, Tokenizer
from axsparse.data.prepare.whole_files import digest_of
from axsparse.data.stdlib import SEPARATOR as STDLIB_SEPARATOR
from axsparse.data.token_file import TOKENIZER, read_sidecar
from axsparse.runtime.errors import DataError, reading

if TYPE_CHECKING:
    from axsparse.config.schema import DataConfig

WHERE = "data.path"


def run_tokenizer(data: DataConfig) -> tuple[Tokenizer, int]:
    """The tokenizer, and the token that ends a document in the data.

    Raises MissingInputError if the folder of tokens or its tokenizer cannot be read, DataError if
    the tokenizer is not the one that made the tokens, ConfigError without the library for it.
    """
    if data.source == "stdlib":
        return ByteTokenizer(), STDLIB_SEPARATOR
    assert data.path is not None, "a run on tokens has a path"
    folder = Path(data.path)
    sidecar = read_sidecar(folder, WHERE)
    if sidecar.tokenizer.kind == "bytes":
        return ByteTokenizer(), sidecar.separator
    path = folder / TOKENIZER
    with reading(f"{WHERE}: {path}", "copy it again, or prepare the data again"):
        digest = digest_of(path)
    if digest != sidecar.tokenizer.digest:
        raise DataError(
            f"{WHERE}: {path} is not the tokenizer that made the tokens; copy it again, or prepare "
            "the data again"
        )
    separator = str(sidecar.settings.get("separator", SEPARATOR))
    return Subwords(path, sidecar.tokenizer, separator), sidecar.separator
