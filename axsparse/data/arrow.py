"""Tables in files of Apache Arrow and Parquet, read by pyarrow, an optional dependency."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from axsparse.runtime.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import NativeFile, RecordBatch

LABELS = "labels"
"""The column of targets next to token ids."""
MASKS = ("completion_mask", "assistant_masks")
"""Columns next to token ids: 0 for tokens that are no targets."""
PADDING = "attention_mask"
"""The column next to token ids that is 0 for padding, which is no text."""
MAGIC = b"ARROW1"
"""Begins an Arrow file with a table of contents; `datasets` writes a stream without one."""
ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""


def columns_of(file: BinaryIO, *, parquet: bool) -> list[str]:
    """The names of the columns. Raises OSError for a file that is no such table."""
    pyarrow = import_pyarrow()
    with refusing():
        if parquet:
            return list(pyarrow.parquet.ParquetFile(file).schema_arrow.names)
        return list(_opened(pyarrow, file).schema.names)


def rows_of(file: BinaryIO, columns: list[str], *, parquet: bool) -> Iterator[dict[str, Any]]:
    """The rows of a file as Python values, texts as bytes, in the memory of one row group.

    Raises OSError where the file is damaged.
    """
    pyarrow = import_pyarrow()
    with refusing():
        if parquet:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(ROWS, columns=columns)
        else:
            batches = (batch.select(columns) for batch in arrow_batches(file))
    while True:
        with refusing():
            batch = next(batches, None)
            if batch is None:
                return
            # Bytes: one text that is not UTF-8 is no reason to refuse the others.
            values = [_undecoded(pyarrow, column) for column in batch.columns]
            for column in values:
                column.validate(full=True)
            rows = pyarrow.RecordBatch.from_arrays(values, batch.schema.names).to_pylist()
        yield from rows


def _undecoded(pyarrow: Any, column: Any) -> Any:
    """A column of texts as bytes; any other column as it is."""
    kinds = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    return column.cast(kinds.get(column.type, column.type))


def arrow_batches(file: BinaryIO | NativeFile) -> Iterator[RecordBatch]:
    """The parts of an Arrow file, or of a stream."""
    reader = _opened(import_pyarrow(), file)
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _opened(pyarrow: Any, file: BinaryIO | NativeFile) -> Any:
    file.seek(0)
    begins = file.read(len(MAGIC))
    file.seek(0)
    return pyarrow.ipc.open_file(file) if begins == MAGIC else pyarrow.ipc.open_stream(file)


@contextmanager
def refusing() -> Iterator[None]:
    """OSError for pyarrow's errors about a damaged file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, NotImplementedError, MemoryError) as reason:
        raise OSError(0, " ".join(str(reason).split())) from reason


def import_pyarrow() -> Any:
    """The library; raises ConfigError if it is not installed."""
    # Its own pool of memory would keep freed blocks.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "files of Arrow and Parquet need pyarrow, which is not installed; "
            "pip install 'axsparse[arrow]'"
        ) from None
    return pyarrow
