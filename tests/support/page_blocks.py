"""The package as text; the code blocks of README and docs, and how each is to be run.

A block is run in the order of its page, in one folder a page. Comments of HTML, which readers do
not see, say what is not run as it stands, right before a block:

    <!-- not run: reason -->           it stays out; the number of these is counted by a test
    <!-- exits with 78 -->             each command may end with this code as well as with 0
    <!-- may exit with 1: reason -->
    <!-- ranks: 4 -->                  Python under mpirun

and what has to be there first: `<!-- test`, commands, `-->`, each on a separate line, runs the
commands; `<!-- file: NAME`, text, `-->` writes a file before anything is run, as does a block with
title="NAME". Before each block of Python, `setup.py` of the folder is run, if there is one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import axsparse

PACKAGE = Path(axsparse.__file__).parent
BUNDLED = sorted(path.stem for path in (PACKAGE.parent / "configs").glob("*.yaml"))
"""The names of the bundled configurations."""


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package but the empty folder heads, without "axsparse." in front."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] != "__init__":
            found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "CONTRIBUTING.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
SHELL = frozenset({"console", "sh"})
SHOWN_ONLY = frozenset({"", "text", "json"})
"""The languages of output of programs."""
_PIECE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$"
    r"|^<!-- (?P<comment>.*?) ?-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page, or a hidden one that prepares those that follow."""

    page: str
    line: int
    language: str
    code: str
    title: str | None = None
    reason: str | None = None
    """Why it is not run; None if it is."""
    codes: tuple[int, ...] = (0,)
    """The exit codes that its commands may have."""
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a block of shell, each in one line; what they print is left out."""
        text = self.code.replace("\\\n", " ")
        lines = text.splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return typed or [line for line in lines if line.strip()]


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    reason, ranks = None, 1
    codes: tuple[int, ...] = (0,)
    for found in _PIECE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        comment = found["comment"]
        if comment is None:
            yield Block(
                page, line, found["language"], found["code"], found["title"], reason, codes, ranks
            )
            reason, codes, ranks = None, (0,), 1
        elif comment.startswith("test\n"):
            yield Block(page, line, "sh", comment.partition("\n")[2])
        elif comment.startswith("file: "):
            name, _, code = comment.removeprefix("file: ").partition("\n")
            yield Block(page, line, "file", code + "\n", name)
        elif comment.startswith("not run: "):
            reason = comment.removeprefix("not run: ")
        elif number := re.match(r"(?:may exit|exits) with (\d+)", comment):
            codes = (0, int(number[1]))
        elif number := re.match(r"ranks: (\d+)", comment):
            ranks = int(number[1])
        elif not comment.startswith("picture: "):
            raise AssertionError(f"{page}:{line}: nobody knows the comment {comment!r}")
