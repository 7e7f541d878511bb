"""`axsparse completion`: prints a script that lets a shell complete commands, options and keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from axsparse.cli.commands import all_parsers
from axsparse.cli.parser import CommandParser, say
from axsparse.config.json_schema import FIELDS
from axsparse.config.load import bundled_configs
from axsparse.planner.cluster import bundled_clusters

DESCRIPTION = """\
Print a script that lets bash or zsh complete commands, options, settings and bundled names. It
is made once, so that completing starts no Python:

  axsparse completion > ~/.axsparse-completion
  echo 'source ~/.axsparse-completion' >> ~/.bashrc      # or ~/.zshrc
"""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
SCRIPT = """\
# Completes axsparse in bash and zsh; written by `axsparse completion`.
_axsparse_found() {  # of the last word but one, the first two after axsparse, and the word's place
  found= end=' '
  case "$1" in
    --config) found=@configs@ ;;
    --cluster|--print-cluster) found=@clusters@ ;;
    --set) found=@keys@ end= ;;
    *)
      case "$2 $3" in
@options@
      esac
      [ "$4" -gt 1 ] || found=@commands@ ;;
  esac
}
if [ -n "${ZSH_VERSION-}" ]; then
  _axsparse() {
    local found end
    _axsparse_found "${words[CURRENT-1]}" "${words[2]-}" "${words[3]-}" $((CURRENT - 1))
    compadd -S "$end" -- ${=found} || _files
  }
  whence compdef > /dev/null || { autoload -U +X compinit && compinit -u; }
  compdef _axsparse axsparse
else
  _axsparse() {
    local found end at="$COMP_CWORD"
    _axsparse_found "${COMP_WORDS[at-1]}" "${COMP_WORDS[1]-}" "${COMP_WORDS[2]-}" "$at"
    [ -n "$end" ] || compopt -o nospace
    COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[at]}"))
  }
  complete -o default -F _axsparse axsparse
fi
"""


def parser() -> CommandParser:
    """The command line."""
    return CommandParser(
        lambda _: say(script()), prog="axsparse completion", description=DESCRIPTION
    )


def script() -> str:
    """The text of the script."""
    followers: dict[str, list[str]] = {}
    for words, its_parser in all_parsers().items():
        command, _, member = words.partition(" ")
        if member:
            followers.setdefault(command, []).append(member)
        followers.setdefault(words, []).extend(
            sorted({"--help", *OPTION.findall(its_parser.format_usage())})
        )
    # The longest first, since a shell takes the first pattern that fits.
    options = "\n".join(
        f"        {shlex.quote(words)}{'' if ' ' in words else chr(92) + ' *'}) "
        f"found={_quoted(followers[words])} ;;"
        for words in sorted(followers, key=lambda words: -words.count(" "))
    )
    values = {
        "configs": _quoted(f"{name}.yaml" for name in bundled_configs()),
        "clusters": _quoted(bundled_clusters()),
        "keys": _quoted(f"{key}=" for key in FIELDS),
        "commands": _quoted(sorted({words.partition(" ")[0] for words in followers})),
        "options": options,
    }
    return re.sub("@(\\w+)@", lambda match: values[match[1]], SCRIPT).rstrip("\n")


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
