"""The output for users: lines, the bar, and whether there is a terminal to draw it on."""

from __future__ import annotations

import errno
import io
import sys
from typing import TextIO, cast

import pytest

from axsparse.runtime.console import (
    Console,
    format_bytes,
    format_count,
    format_seconds,
    make_console,
)
from axsparse.runtime.process import LAUNCHER_VARIABLES


class FlushedStream(io.StringIO):
    """A stream that knows what would have reached the screen."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


# The stream


def test_a_process_without_the_stream_prints_nothing() -> None:
    console = make_console(None)
    console.line("said")
    console.progress(1, 2, "batches")
    console.close()


def test_a_log_gets_plain_lines_and_no_bar() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=False)

    screen.line("first")
    screen.progress(1, 2, "loss 3.9")
    screen.line("second")
    screen.close()

    assert stream.seen == "first\nsecond\n"


def test_letters_that_a_stream_lacks_are_question_marks() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    Console(stream, bar=False).line("1 MB · 2 s")

    stream.seek(0)
    assert stream.read() == "1 MB ? 2 s\n"


def test_a_bar_is_the_last_row_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "32")
    stream = FlushedStream()
    screen = Console(stream, bar=True)

    screen.progress(1, 2, "loss 2.000  1.0k tokens/s")
    screen.line("a line")
    screen.close()

    bar = "████░░░░ 1/2  loss 2.000  1.0k \r"
    assert stream.seen == f"\x1b[K{bar}\x1b[Ka line\n{bar}\x1b[K"


# The choice


class TerminalStream(FlushedStream):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "stream", "has_bar"),
    [
        ({}, TerminalStream(), True),
        ({}, FlushedStream(), False),
        ({"TERM": "dumb"}, TerminalStream(), False),
        # Under a launcher no rank knows of a terminal.
        *(({name: "0"}, TerminalStream(), False) for name in LAUNCHER_VARIABLES),
    ],
)
def test_the_terminal_decides_on_the_bar(
    variables: dict[str, str], stream: FlushedStream, has_bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    make_console(stream).progress(1, 2, "loss")

    assert ("1/2  loss" in stream.seen) == has_bar


def test_a_stream_that_print_can_use_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    class Tee:
        """A stand-in for stdout, as programs write one to copy it to a file."""

        write, flush = sys.stdout.write, sys.stdout.flush

    make_console(cast(TextIO, Tee())).line("said")

    assert capsys.readouterr().out == "said\n"


# Figures


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(1000), "1.0 kB"),
        (format_bytes(99_949_999), "99.9 MB"),
        (format_bytes(99_950_000), "100 MB"),
        (format_bytes(999_499_999), "999 MB"),
        (format_bytes(999_500_000), "1.0 GB"),
        (format_bytes(43_200_000_000_000), "43.2 TB"),
        (format_bytes(5 * 10**18), "5000 PB"),
        (format_count(17), "17"),
        (format_count(4_700_000), "4.7M"),
        (format_count(2.7e9), "2.7B"),
        (format_count(1e12), "1.0T"),
        (format_seconds(0), "00:00"),
        (format_seconds(59.6), "01:00"),
        (format_seconds(3599), "59:59"),
        (format_seconds(3723), "1:02:03"),
        (format_seconds(360_000), "100:00:00"),
    ],
)
def test_figures_have_the_units_of_the_field(made: str, text: str) -> None:
    assert made == text


class Gone(io.StringIO):
    """A stream that cannot be written any more."""

    reason: OSError

    def flush(self) -> None:
        raise self.reason


@pytest.mark.parametrize(
    ("reason", "lost"),
    [
        (BrokenPipeError(), ""),  # the reader of a pipe went away
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_a_lost_screen_ends_no_run(reason: OSError, lost: str) -> None:
    stream = Gone()
    stream.reason = reason
    console = Console(stream, bar=False)

    console.line("first")
    console.line("second")
    console.close()

    assert console.lost == lost


def test_lines_go_to_the_present_stdout_once_their_stream_is_closed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    console = Console(stream, bar=True)
    stream.close()

    console.line("first")
    console.progress(1, 2, "loss")
    console.line("second")

    assert capsys.readouterr().out == "first\nsecond\n"


def test_a_closed_stdout_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)

    Console(stream, bar=False).line("lost")
