"""Output of rank 0: lines, a progress bar if there is a terminal, and the format of figures."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from axsparse.runtime.errors import ConfigError
from axsparse.runtime.process import started_by_launcher

Unit = Literal["tokens", "samples"]
_ERASE = "\x1b[J"
_CLEAR = f"\r{_ERASE}"
_BACK = "\x1b[1A\r"
"""Brings the cursor to the beginning of the row above."""
PLAIN_TERMINALS = ("dumb", "unknown")


class Console:
    """Prints lines on a stream and keeps a row with a progress bar below them, if asked to.

    The cursor rests at the beginning of an empty row above the bar. So what other processes
    print stands by itself, and a terminal that has become narrower, and may have folded the bar,
    is clean once everything below the cursor is erased. A terminal of one row has no bar, since
    what has left it at the top cannot be erased any more.
    """

    def __init__(
        self,
        stream: TextIO,
        bar: bool,
        size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
    ) -> None:
        """`bar` says whether a bar is kept; `size` gives the size of the terminal, which may
        change."""
        self._stream = stream
        self._keeps_bar = bar
        self._size = size
        self._shown: tuple[int, int, str] | None = None
        """The last step, the number of steps, and the text next to the bar."""
        self._lost = False

    def line(self, text: str) -> None:
        """Print a full line above the bar, and flush it, since pipes buffer."""
        drawn = self._drawn()
        self._write(f"{_CLEAR if drawn else ''}{text}\n{drawn}")

    def progress(self, step: int, steps: int, text: str) -> None:
        """Draw a bar at `step` of `steps` with a text next to it, where a bar is kept."""
        if self._keeps_bar:
            self._shown = step, steps, text
            self._write(_CLEAR + self._drawn())

    def close(self) -> None:
        if self._drawn():
            self._shown = None
            self._write(_CLEAR)

    def _drawn(self) -> str:
        """The bar below an empty row, to whose beginning the cursor returns."""
        if self._shown is None:
            return ""
        step, steps, text = self._shown
        size = self._size()
        width = min(24, size.columns // 4)
        done = width * step // steps
        row = f"{'█' * done}{'░' * (width - done)} {step}/{steps}  {text}"
        return f"\n{row[: size.columns - 1]}{_BACK}" if size.lines > 1 else ""

    def _write(self, text: str) -> None:
        """Write and flush; once the reader has gone, do nothing, since metrics.jsonl has it all."""
        if self._lost:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._lost = True


def make_console(stream: TextIO) -> Console:
    """A console that keeps a bar if the stream is a terminal, or as AXSPARSE_PROGRESS says.

    What a rank under mpirun writes passes through its launcher, so that no rank knows of a
    terminal. Raises ConfigError if AXSPARSE_PROGRESS is neither "bar" nor "plain".
    """
    wish = os.environ.get("AXSPARSE_PROGRESS", "")
    if wish not in ("", "bar", "plain"):
        raise ConfigError(
            f"AXSPARSE_PROGRESS (environment): {wish!r} is no way to show progress; "
            "set bar or plain, or unset it to let the terminal decide"
        )
    return Console(stream, bar=_keeps_bar(stream))


def erase_bar(stream: TextIO) -> None:
    """Erase the bar that a console of this job may have left below the cursor, if it keeps one.

    For a rank that ends the job, whose first rank has no time to do so. Nothing else is erased,
    whether other output comes before or after.
    """
    if _keeps_bar(stream):
        with contextlib.suppress(OSError):
            stream.write(_ERASE)
            stream.flush()


def _keeps_bar(stream: TextIO) -> bool:
    wish = os.environ.get("AXSPARSE_PROGRESS", "")
    is_able = os.environ.get("TERM") not in PLAIN_TERMINALS and stream.isatty()
    return wish == "bar" or (wish == "" and is_able and not started_by_launcher())


def format_bytes(n: float) -> str:
    """Bytes in decimal units: 11_400_000 is "11.4 MB"."""
    return _scaled(n, (" B", " kB", " MB", " GB", " TB", " PB"))


def format_count(n: float) -> str:
    """A count with a suffix: 4_700_000 is "4.7M". B is 10⁹, as in the names of models."""
    return _scaled(n, ("", "k", "M", "B", "T"))


def format_rate(rate: float, unit: Unit) -> str:
    """A rate per second: 3_100 is "3.1k tokens/s"."""
    return f"{format_count(rate)} {unit}/s"


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
