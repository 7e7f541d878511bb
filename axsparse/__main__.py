"""`axsparse COMMAND …`: hands over to one of the commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from axsparse.cli.parser import COMMANDS, CommandParser, reject, run_command, say
from axsparse.runtime.process import interrupt
from axsparse.runtime.provenance import __version__


def usage() -> str:
    """All commands, a line each."""
    lines = [
        f"  {name:10} {command.purpose} (axsparse {name} --help)\n"
        for name, command in COMMANDS.items()
    ]
    return "usage: axsparse COMMAND ...\n\ncommands:\n" + "".join(lines).rstrip()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Hand over to the command that is named, which loads no library of another one."""
    word, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if word == "help" and rest:
        word, rest = rest[0], [*rest[1:], "--help"]
    if word in COMMANDS:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, interrupt)
        module = import_module(COMMANDS[word].module)
        if hasattr(module, "main"):
            module.main(rest)
        parser = module.parser()
        if rest[:1] == parser.prog.split()[2:]:  # a second word, as in `config show`
            rest = rest[1:]
        run_command(parser, rest)
    if word in ("-h", "--help", "help"):
        run_command(CommandParser(lambda _: say(usage())), [])
    if word == "--version":
        run_command(CommandParser(lambda _: say(f"axsparse {__version__}")), [])
    nearest = get_close_matches(word[:60], COMMANDS, n=1)
    suggestion = f"did you mean {nearest[0]}? " if nearest else ""
    reject(f"no command {word!r}; {suggestion}see axsparse --help")


if __name__ == "__main__":
    main()
