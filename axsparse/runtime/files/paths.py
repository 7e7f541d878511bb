"""Paths as users write them, with `~` and variables."""

from __future__ import annotations

import os
import re

from axsparse.runtime.errors import ConfigError

_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|\{)")
"""Matches the remains of a variable that is not set."""


def expanded(given: str | os.PathLike[str]) -> str:
    """A path with `~` and `$VARIABLE` in their place: a shell leaves them in `--out=~/x` and in
    quotes, and no shell reads a program's texts.

    ConfigError for users and variables that are not known.
    """
    text = os.fspath(given)
    path = os.path.expandvars(os.path.expanduser(text))  # noqa: PTH111 - Path would change the text
    if path.startswith("~") or _VARIABLE.search(path) is not None:
        raise ConfigError(f"{text!r} should be a path of known users and variables")
    return path
