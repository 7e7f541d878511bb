"""The Makefile, asked what it would run."""

from __future__ import annotations

import os
import shlex
import subprocess

from support.page_blocks import PAGES, ROOT, SHELL, blocks


def commands_with_arguments() -> dict[str, str]:
    """The calls of make in the examples of pages, and what each gives as ARGS."""
    shown = (block for page in PAGES for block in blocks(page) if block.language in SHELL)
    found = {}
    for line in (line for block in shown for line in block.commands if line.startswith("make ")):
        for word in shlex.split(line, comments=True):
            if word.startswith("ARGS="):
                found[line] = word.removeprefix("ARGS=")
    return found


def test_arguments_that_pages_give_to_make_reach_its_commands_as_they_stand() -> None:
    commands = commands_with_arguments()
    assert any("$" in arguments for arguments in commands.values()), "the pages have examples"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for command, arguments in commands.items():
        dry = command.replace("make", "make --dry-run", 1)

        done = subprocess.run(  # noqa: S602 - the shell reads the line as a user's does
            dry, cwd=ROOT, env=outside, shell=True, capture_output=True, text=True, check=True
        )

        assert arguments in done.stdout, command
