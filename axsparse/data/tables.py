"""Files of Apache Arrow and Parquet, and compressed ones, which pyarrow reads, an optional
dependency."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from axsparse.runtime.errors import ConfigError

ARROW_MAGIC = b"ARROW1"
"""Begins an Arrow file with a table of contents; `datasets` writes a stream without one."""
ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""


def open_table(
    file: BinaryIO, wanted: Collection[str], *, parquet: bool
) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The names of a file's columns, and its rows as Python values of the wanted columns, texts as
    bytes and structs without keys that are None, in the memory of one row group.

    Raises OSError where the file is damaged or no such table, ConfigError without pyarrow.
    """
    pyarrow = _import_pyarrow()
    with _damaged():
        if parquet:
            table = pyarrow.parquet.ParquetFile(file)
            names = list(table.schema_arrow.names)
            batches = table.iter_batches(ROWS, columns=[name for name in names if name in wanted])
        else:
            is_stream = file.read(len(ARROW_MAGIC)) != ARROW_MAGIC
            file.seek(0)
            table = (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(file)
            names = list(table.schema.names)
            columns = [name for name in names if name in wanted]
            every = range(getattr(table, "num_record_batches", 0))
            parts = table if is_stream else map(table.get_batch, every)
            batches = (batch.select(columns) for batch in parts)
    return names, _rows(pyarrow, batches)


def open_zstd(file: BinaryIO) -> BinaryIO:
    """The contents of a file that zstd has compressed; it raises OSError where that is damaged, and
    ConfigError without pyarrow."""
    with _damaged():
        stream = _import_pyarrow().CompressedInputStream(file, "zstd")
    return cast("BinaryIO", io.BufferedReader(stream))


def _rows(pyarrow: Any, batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    # Bytes: one text that is not UTF-8 is no reason to refuse the others.
    kinds = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    while True:
        with _damaged():
            batch = next(batches, None)
            if batch is None:
                return
            columns = [column.cast(kinds.get(column.type, column.type)) for column in batch.columns]
            for column in columns:
                column.validate(full=True)
            rows = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
            for field in filter(_has_keys, batch.schema):
                for row in rows:
                    row[field.name] = _given(row[field.name], field)
        yield from rows


def _is_json(field: Any) -> bool:
    """Whether values have the type `Json` of `datasets`; a pyarrow before 19 has texts of them."""
    extension = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    return bool(getattr(field.type, "extension_name", extension) == "arrow.json")


def _has_keys(field: Any) -> bool:
    """Whether objects of JSON, or of a struct, are in the values of a field."""
    parts = [field.type.field(number) for number in range(field.type.num_fields)]
    return _is_json(field) or str(field.type).startswith("struct") or any(map(_has_keys, parts))


def _given(value: Any, field: Any) -> Any:
    """A value of a field as it was given to `datasets`: all JSON in it is read, and a struct is
    without the keys that are None because other messages or tools have them."""
    if value is None or isinstance(value, tuple) or not _has_keys(field):  # a map has tuples
        return value
    if _is_json(field):
        return json.loads(value)
    if isinstance(value, dict):
        return {
            part.name: _given(value[part.name], part)
            for part in field.type
            if value[part.name] is not None
        }
    return [_given(one, field.type.field(0)) for one in value]


@contextmanager
def _damaged() -> Iterator[None]:
    """OSError for pyarrow's errors about a damaged file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RuntimeError, MemoryError) as reason:
        raise OSError(0, " ".join(str(reason).split())) from reason


def _import_pyarrow() -> Any:
    # Its own pool of memory would keep freed blocks.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "files of Arrow, Parquet and .zst need pyarrow, which is not installed; "
            "pip install 'axsparse[arrow]'"
        ) from None
    return pyarrow
