"""Output of rank 0: lines, a progress bar if there is a terminal, and the format of figures."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from axsparse.runtime.process import started_by_launcher

Unit = Literal["tokens", "samples"]
_CLEAR = "\x1b[K"
"""Erases the row from the cursor on."""


@dataclass(eq=False)
class Console:
    """Prints lines on a stream and keeps a row with a progress bar below them, if asked to. The
    cursor rests at the beginning of that row, so that what others print covers it."""

    stream: TextIO | None
    """None where the process has none, as a daemon; nothing is printed then."""
    bar: bool
    lost: str = ""
    """Why the stream could not be written; empty if its reader has gone, which is no mistake."""
    _row: str = ""

    def line(self, text: str) -> None:
        """Print a full line above the bar, and flush it, since pipes buffer."""
        self._write(f"{_CLEAR if self._row else ''}{text}\n{self._row}")

    def progress(self, step: int, steps: int, text: str) -> None:
        """Draw a bar at `step` of `steps` with a text next to it, where a bar is kept."""
        if self.bar:
            columns = shutil.get_terminal_size().columns
            width = min(24, columns // 4)
            done = width * step // steps
            row = f"{'█' * done}{'░' * (width - done)} {step}/{steps}  {text}"
            self._row = f"{row[: columns - 1]}\r"
            self._write(_CLEAR + self._row)

    def close(self) -> None:
        if self._row:
            self._row = ""
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        """Write and flush; after a failure do nothing, since metrics.jsonl has it all. A stream
        that the program has closed is replaced by the present stdout, without a bar."""
        if self.stream is None:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except UnicodeEncodeError:  # a ValueError too
            encoding = self.stream.encoding
            self._write(text.encode(encoding, errors="replace").decode(encoding))
        except ValueError:
            self.stream = None if self.stream is sys.stdout else sys.stdout
            self.bar, self._row = False, ""
            self._write(text)
        except OSError as reason:
            self.stream = None
            if not isinstance(reason, BrokenPipeError):
                self.lost = reason.strerror or str(reason)


def make_console(stream: TextIO | None) -> Console:
    """A console that keeps a bar if the stream is a terminal. What a rank under mpirun writes
    passes through its launcher, so that no rank knows of a terminal."""
    is_terminal = getattr(stream, "isatty", bool)()
    is_able = is_terminal and os.environ.get("TERM") not in ("dumb", "unknown")
    return Console(stream, bar=is_able and not started_by_launcher())


def format_bytes(n: float) -> str:
    """Bytes in decimal units: 11_400_000 is "11.4 MB"."""
    return _scaled(n, (" B", " kB", " MB", " GB", " TB", " PB"))


def format_count(n: float) -> str:
    """A count with a suffix: 4_700_000 is "4.7M". B is 10⁹, as in the names of models."""
    return _scaled(n, ("", "k", "M", "B", "T"))


def format_seconds(s: float) -> str:
    """A duration: 12 is "00:12", 3_723 is "1:02:03"."""
    minutes, seconds = divmod(round(s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def _scaled(value: float, units: Sequence[str]) -> str:
    """The value in the unit that leaves up to three digits before the point."""
    unit = 0
    # A value from 999.5 on would be rounded to four digits.
    while value >= 999.5 and unit < len(units) - 1:
        value /= 1000
        unit += 1
    decimals = 1 if unit and value < 99.95 else 0
    return f"{value:.{decimals}f}{units[unit]}"
