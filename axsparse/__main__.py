"""`axsparse COMMAND …`: hands over to one of the commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

from axsparse.cli.parser import COMMANDS, CommandParser, reject, run_command, say
from axsparse.runtime.process import code_of_interrupt, exit_process, interrupt, speaks
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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, interrupt)
        module = import_module(COMMANDS[word].module)
        if hasattr(module, "main"):
            try:
                module.main(rest)
            except KeyboardInterrupt as failure:  # it handles signals from when it has begun
                exit_process(code_of_interrupt(failure), "error: interrupted" * speaks() or None)
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
    if word.startswith("-"):
        suggestion = f"name one before it, such as axsparse train {word}; "
    reject(f"no command {word!r}; {suggestion}see axsparse --help")


if __name__ == "__main__":
    main()
