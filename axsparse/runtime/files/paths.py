"""Paths as users write them, with `~` and variables, and whose file is there."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Literal

from axsparse.runtime.errors import ConfigError, OutputError, check_kind, reading, writing


def expanded(given: str | os.PathLike[str]) -> str:
    """A path with `~` and `$VARIABLE` in their place: a shell leaves them in `--out=~/x` and in
    quotes, and no shell reads a program's texts. ConfigError for those that are not
    known, and for what is no path."""
    check_kind("path", given, str | os.PathLike, "give the path of a file or folder")
    text = os.fspath(given)
    path = os.path.expandvars(os.path.expanduser(text))  # noqa: PTH111 - Path would change the text
    if path.startswith("~") or re.search(r"\$([A-Za-z_]\w*|\{)", path):  # of one that is not set
        raise ConfigError(
            f"{text!r} should be a path of known users and variables; write it in full"
        )
    return path


def kind_of(where: str, path: Path) -> Literal["file", "folder", "other", ""]:
    """Whether there is a file, a folder or something else at a path that is read; "" if nothing is.

    MissingInputError, which begins with `where`, if the system does not say, as of what is in
    another user's folder: `Path.is_file` and its like raise OSError then.
    """
    with reading(where, "name one that can be read"):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return ""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def is_own(path: Path, mark: str) -> bool:
    """Whether axsparse, which writes `mark` near the beginning of files of this kind, has written
    the file; an empty one is nobody's. OSError if it cannot be read."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return not head or mark.encode() in head


def reject_foreign(where: str, path: Path, mark: str) -> None:
    """OutputError if something is there that axsparse has not written, as `is_own` tells."""
    if (path.is_symlink() or path.exists()) and not is_own(path, mark):
        raise OutputError(
            f"{where} {str(path)!r} is not what axsparse has written, and stays; choose another "
            "place"
        )


def reject_within(path: Path, folder: Path, what: str) -> None:
    """ConfigError if a place to write is the folder that is read, or within it; `what` names it."""
    with writing(f"{path}:", "choose another place"):
        out, source = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if source in (out, *out.parents):
        part = f"{what} itself" if out == source else f"within {what}'s folder"
        raise ConfigError(f"{path} is {part}; choose another place")
