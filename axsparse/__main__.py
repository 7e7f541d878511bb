"""`axsparse COMMAND …`: the commands under one name."""

from __future__ import annotations

import sys
from typing import NoReturn

from axsparse.errors import EXIT_CONFIG
from axsparse.transport import speaks

USAGE = """\
usage: axsparse COMMAND ...

commands:
  train    train what a configuration file describes (axsparse train --help)
  data     turn text files into tokens (axsparse data prepare --help)
"""


def main() -> NoReturn:
    """Hand over to the command; one of many ranks speaks."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "train":
        from axsparse import train

        train.main(sys.argv[2:])
    if command == "data":
        from axsparse import data_command

        data_command.main(sys.argv[2:])
    if command in ("-h", "--help"):
        sys.stdout.write(USAGE if speaks() else "")
        sys.exit(0)
    if command == "--version":
        import axsparse

        print(f"axsparse {axsparse.__version__}")
        sys.exit(0)
    if speaks():
        print(f"axsparse: error: no command {command!r}; see axsparse --help", file=sys.stderr)
    sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
