"""The exceptions that users meet, and the exit code each of them ends a job with.

    AxsparseError                 70  base class; never raised itself
    ├── ConfigError               78  a key, flag or combination that cannot be run
    ├── DataError                 65  data that does not fit the run
    ├── MissingInputError         66  a named file or folder that is not there
    ├── OutputError               74  a place that cannot be written
    │   └── InUseError            73  a directory that another run or process has
    ├── TrainingError             70  a run that cannot continue (non-finite numbers, say)
    └── StoppedError              75  a program that was asked to stop; its run is saved

Each message is one line: where the value was set, the value, the rule, and a suggestion. Internal
invariants are asserts, not members of this tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from errno import EACCES, EEXIST, EISDIR, ELOOP, ENOENT, ENOTDIR, EROFS
from types import NoneType
from typing import Any, SupportsFloat, SupportsInt, TypeVar

EXIT_DATA = 65
EXIT_MISSING = 66
EXIT_INTERNAL = 70
EXIT_IN_USE = 73
EXIT_OUTPUT = 74
EXIT_SAVED = 75
EXIT_CONFIG = 78


class AxsparseError(Exception):
    """Base of all errors that are shown to users as one line without a traceback."""

    exit_code = EXIT_INTERNAL
    on_all_ranks = False
    """Whether every rank raises this error at the same point, so that each can exit by itself."""

    def _render_traceback_(self) -> list[str]:
        """The line that a notebook shows in place of a traceback (a protocol of IPython)."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(AxsparseError):
    """A configuration that cannot be run."""

    exit_code = EXIT_CONFIG


class DataError(AxsparseError):
    """Data that does not fit the run: too short, changed, or of another kind."""

    exit_code = EXIT_DATA


class MissingInputError(AxsparseError):
    """An input that was named but does not exist."""

    exit_code = EXIT_MISSING


class OutputError(AxsparseError):
    """A file or folder that cannot be written."""

    exit_code = EXIT_OUTPUT


class InUseError(OutputError):
    """A directory that holds another run, or that another process holds."""

    exit_code = EXIT_IN_USE


class TrainingError(AxsparseError):
    """A run that cannot continue."""

    exit_code = EXIT_INTERNAL


class StoppedError(AxsparseError):
    """A program was asked to stop; what a run had done is saved. All ranks raise it."""

    exit_code = EXIT_SAVED
    on_all_ranks = True


Error = TypeVar("Error", bound=AxsparseError)


def everywhere(error: Error) -> Error:
    """Mark an error that every rank raises at the same point, and return it."""
    error.on_all_ranks = True
    return error


NO_LACK = (EEXIST, ENOTDIR, EISDIR, ENOENT, EACCES, EROFS, ELOOP)
"""Errors of files that have nothing to do with the space on a disk."""
_FREEING = re.compile(r"^free (the disk|space [a-z ]+),? or |, or free the disk$")


@contextmanager
def _using(error: type[AxsparseError], what: str, suggestion: str) -> Iterator[None]:
    """Raise `error` in place of an OSError of the code within, and of what Python raises for a name
    that no file can have."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as reason:
        if isinstance(reason, OSError):
            why = reason.strerror or str(reason)
            if reason.errno in NO_LACK:
                suggestion = _FREEING.sub("", suggestion)
        elif isinstance(reason, UnicodeEncodeError) or "embedded null" in str(reason):
            why = "its name has characters that no file name can have"
        elif str(reason).startswith("Symlink loop"):  # of Path.resolve, before Python 3.13
            why, suggestion = os.strerror(ELOOP), _FREEING.sub("", suggestion)
        else:
            raise
        raise error(f"{what} ({why}); {suggestion}") from reason


def writing(what: str, suggestion: str) -> AbstractContextManager[None]:
    """Turn an OSError of the code within into an OutputError; `what` names the place."""
    return _using(OutputError, f"{what} cannot be written", suggestion)


def reading(what: str, suggestion: str) -> AbstractContextManager[None]:
    """Turn an OSError of the code within into a MissingInputError; else like `writing`."""
    return _using(MissingInputError, f"{what} cannot be read", suggestion)


def check_kind(what: str, given: object, kinds: Any, suggestion: str) -> None:
    """ConfigError for an argument of the Python API that is of none of the `isinstance` kinds."""
    if not isinstance(given, kinds):
        raise ConfigError(f"{what} is {type(given).__name__}; {suggestion}")


KINDS: dict[str, Any] = {
    **{"text": str, "path": str | os.PathLike, "whole number": SupportsInt},
    **{"number": SupportsFloat, "function": Callable, "sequence": Collection, "list": Iterable},
    "None": NoneType,
}
"""Types of arguments by their names; numbers may be numpy's, and a list any iterable."""


def check_kinds(what: str, given: Mapping[str, object], **kinds: str) -> None:
    """`check_kind` of arguments, by name, that are to be of kinds such as "number or None"."""
    for name, kind in kinds.items():
        known = tuple(map(KINDS.__getitem__, kind.split(" or ")))
        check_kind(f"{what}: {name}", given[name], known, f"give a {kind}")


def printable(text: str) -> str:
    """A text in one line, in which each letter that a terminal would act on is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def one_line(reason: BaseException) -> str:
    return f"{type(reason).__name__}: {printable(str(reason)) or 'no message'}"


@contextmanager
def note_errors(where: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Add a note that says where to an exception of the code within, which stays of its class. This
    is `BaseException.add_note`, which Python 3.10 lacks."""
    try:
        yield
    except kind as error:
        error.__dict__.setdefault("__notes__", []).append(where)
        raise
