"""What the commands have in common: one line for a mistake, and one of many ranks speaks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from axsparse.errors import EXIT_CONFIG
from axsparse.transport import speaks

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class CommandParser(argparse.ArgumentParser):
    """A command line of axsparse, which exits with 78 where it cannot be run."""

    def __init__(self, **settings: Any) -> None:
        """As its base; texts stand as they are written, and options are written out."""
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    def error(self, message: str) -> NoReturn:
        if speaks():
            shown = "".join(letter if letter.isprintable() else " " for letter in message)
            print(f"axsparse: error: {shown}; see --help", file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        if speaks():
            super().print_help(file)
