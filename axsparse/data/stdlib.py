"""The source files of Python's standard library as byte tokens: data that is always there."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from axsparse.data.dataset import TokenDataset
from axsparse.data.token_file import Split
from axsparse.runtime.errors import DataError, MissingInputError

VOCAB_SIZE = 256
"""A token is a byte."""
SEPARATOR = 0
"""Follows each file; no source file contains it."""

EXCLUDED_FOLDERS = frozenset(
    # Installed packages and compiled files differ between hosts. Tests are large, and
    # distributions package them separately.
    ("site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "tests", "idle_test")
)


def split_name(split: Split) -> str:
    """The name of the data set of one split."""
    return f"stdlib {split}"


def stdlib_dataset(split: Split, sequence_length: int, *, separate: bool = False) -> TokenDataset:
    """One split of the standard library of the running interpreter.

    `separate`: samples say where documents, which are files, begin.
    """
    # In a virtual environment the library belongs to the base installation.
    tokens, fingerprint = source_tokens(Path(sysconfig.get_path("stdlib")), split)
    return TokenDataset(
        name=split_name(split),
        fingerprint=fingerprint,
        vocab_size=VOCAB_SIZE,
        tokens=tokens,
        sequence_length=sequence_length,
        separator=SEPARATOR if separate else None,
    )


def source_tokens(root: Path, split: Split) -> tuple[NDArray[np.uint8], str]:
    """All `*.py` files of one split below `root`, each followed by a zero byte.

    Files are sorted by their relative paths. The path of a file alone decides its split, so
    that adding a file moves no other one; about one file in ten is validation. The
    fingerprint covers relative paths and contents.

    Raises DataError if a file or folder cannot be read, MissingInputError if there is no file.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts = []
    for name in _source_files(root):
        path = os.fsencode(name)
        if (zlib.crc32(path) % 10 == 0) != (split == "validation"):
            continue
        try:
            content = (root / name).read_bytes()
        except OSError as error:
            _reject(error)
        digest.update(b"%s\0%d\0%s" % (path, len(content), content))
        parts += [content, bytes([SEPARATOR])]
    if not parts:
        raise MissingInputError(
            f"data.source stdlib: {root} holds no Python source files for {split}; use a Python "
            "whose standard library is installed as plain .py files"
        )
    return np.frombuffer(b"".join(parts), dtype=np.uint8), digest.hexdigest()


def _source_files(root: Path) -> list[str]:
    """Sorted relative POSIX paths of all `*.py` files; linked folders are not entered."""
    names = []
    if root.is_dir():
        for folder, subfolders, files in os.walk(root, onerror=_reject):
            subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
            below = Path(folder).relative_to(root)
            names += [(below / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)


def _reject(error: OSError) -> NoReturn:
    raise DataError(
        f"data.source stdlib: {error.filename} cannot be read ({error.strerror}); "
        "make it readable or repair the Python installation"
    ) from error
