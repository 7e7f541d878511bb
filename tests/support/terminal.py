"""A terminal's screen, as far as this package writes to it, that can change its size."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
from dataclasses import dataclass, field
from typing import TextIO

_SEQUENCE = re.compile(r"\x1b\[([0-9]*)([A-Za-z])")


@dataclass
class Row:
    """One row of the screen; `folds` says that its line continues in the next row."""

    text: str = ""
    folds: bool = False


@dataclass
class Screen:
    """All rows that were ever written, the newest below, of which a window shows the last."""

    columns: int
    folds_anew: bool
    """Whether lines are folded anew after a change of width, as most terminals do; others cut."""
    rows: list[Row] = field(default_factory=lambda: [Row()])
    at: int = 0
    """The row of the cursor."""
    column: int = 0
    lines: int = 24
    """The height of the window, above which the cursor cannot go."""

    def feed(self, text: str) -> None:
        """Take what a program writes; AssertionError for a sequence that no test has seen yet."""
        while text:
            if text[0] == "\x1b":
                found = _SEQUENCE.match(text)
                assert found is not None, f"a strange sequence: {text[:8]!r}"
                self._obey(int(found[1] or 0), found[2])
                text = text[found.end() :]
            else:
                self._put(text[0])
                text = text[1:]

    def resize(self, columns: int) -> None:
        """Change the width."""
        self.columns = columns
        if not self.folds_anew:
            for row in self.rows:
                row.text = row.text[:columns]
            self.column = min(self.column, columns - 1)
            return
        old, self.rows = self.rows, []
        line, holds_cursor, offset = "", False, 0
        for number, row in enumerate(old):
            if number == self.at:
                holds_cursor, offset = True, len(line) + self.column
            line += row.text
            if row.folds:
                continue
            first = len(self.rows)
            pieces = [line[i : i + columns] for i in range(0, len(line), columns)] or [""]
            self.rows += [Row(piece, folds=piece is not pieces[-1]) for piece in pieces]
            if holds_cursor:
                at, self.column = first + offset // columns, offset % columns
                holds_cursor, cursor = False, at
            line = ""
        self.at = cursor

    @property
    def text(self) -> list[str]:
        """The lines as somebody reads them."""
        shown = [row.text.rstrip() for row in self.rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self._down()
        else:
            if self.column == self.columns:
                self.rows[self.at].folds = True
                self._down()
                self.column = 0
            row = self.rows[self.at]
            text = row.text.ljust(self.column)
            row.text = text[: self.column] + letter + text[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.at += 1
        if self.at == len(self.rows):
            self.rows.append(Row())

    def _obey(self, number: int, letter: str) -> None:
        if letter == "A":
            top = max(0, len(self.rows) - self.lines)
            self.at = max(top, self.at - (number or 1))
        elif letter == "J":
            assert number == 0, "only what is below is ever erased"
            self.rows[self.at] = Row(self.rows[self.at].text[: self.column])
            del self.rows[self.at + 1 :]
        else:
            assert letter == "m", f"CSI {number} {letter}"


class Terminal:
    """A pseudo-terminal of the system, whose screen a test can read."""

    def __init__(self, columns: int, *, folds_anew: bool = True) -> None:
        self._master, self.slave = os.openpty()
        self.screen = Screen(columns, folds_anew)
        self._streams: list[TextIO] = []
        self.resize(columns)

    def open(self) -> TextIO:
        """A stream that writes to it, and is closed with it."""
        stream = os.fdopen(os.dup(self.slave), "w", encoding="utf-8")
        self._streams.append(stream)
        return stream

    def resize(self, columns: int, lines: int = 24) -> None:
        """Change its size, after all that was written before is on the screen."""
        self.read()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(columns)
        self.screen.lines = lines

    def read(self) -> list[str]:
        """The lines on the screen now."""
        data = b""
        while select.select([self._master], [], [], 0)[0]:
            data += os.read(self._master, 65_536)
        self.screen.feed(data.decode())
        return self.screen.text

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        os.close(self.slave)
        os.close(self._master)
