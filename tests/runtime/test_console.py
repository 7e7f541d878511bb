"""The output for users: lines, the bar, and whether there is a terminal to draw it on."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from support.terminal import Terminal

from axsparse.runtime.console import (
    Console,
    erase_bar,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    make_console,
)
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.process import LAUNCHER_VARIABLES


class FlushedStream(io.StringIO):
    """A stream that knows what would have reached the screen."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AXSPARSE_PROGRESS", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


# The stream


def test_a_log_gets_plain_lines_and_no_bar() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=False)

    screen.line("first")
    screen.progress(1, 2, "loss 3.9")
    screen.line("second")
    screen.close()

    assert stream.seen == "first\nsecond\n"


@pytest.fixture(params=[True, False], ids=["folding", "cutting"])
def screen(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """A pseudo-terminal of the system whose rows can be read."""
    made = Terminal(100, folds_anew=request.param)
    yield made
    made.close()


def console_of(screen: Terminal) -> Console:
    def size() -> os.terminal_size:
        return os.get_terminal_size(screen.slave)

    return Console(screen.open(), bar=True, size=size)


def test_a_terminal_that_changes_in_mid_run_stays_clean(screen: Terminal) -> None:
    shown = console_of(screen)
    sizes = {8: (60, 3), 12: (60, 1), 18: (30, 24), 22: (100, 24), 28: (44, 24)}
    for step in range(1, 41):
        shown.progress(step, 80, "eta 00:40  1.0k tokens/s  loss 2.000")
        if step % 10 == 0:
            shown.line(f"line {step}")
        if step == 15:
            assert not any("eta" in row for row in screen.read())
        if step in sizes:
            screen.resize(*sizes[step])

    lines = ["line 10", "line 20", "line 30", "line 40"]
    assert screen.read() == [*lines, "", "█████░░░░░░ 40/80  eta 00:40  1.0k tokens/s"]
    shown.close()
    assert screen.read() == lines


def test_what_other_processes_print_stands_by_itself(screen: Terminal) -> None:
    shown = console_of(screen)
    shown.line("before")
    shown.progress(1, 2, "eta")

    other = screen.open()
    other.write("axsparse: warning: of another rank\n")
    other.flush()
    shown.progress(2, 2, "eta")
    shown.line("after")

    assert screen.read()[:-1] == ["before", "axsparse: warning: of another rank", "after", ""]


# The choice


class TerminalStream(FlushedStream):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


CHOICES = [
    ("xterm", None, True, True),
    ("xterm", None, False, False),
    ("xterm", "", True, True),
    ("xterm", "bar", False, True),
    ("xterm", "plain", True, False),
    # It cannot move its cursor.
    ("dumb", None, True, False),
    ("dumb", "bar", True, True),
]
"""TERM, AXSPARSE_PROGRESS, whether the stream is a terminal, and whether there is a bar."""


@pytest.fixture(params=CHOICES, ids=str)
def choice(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[FlushedStream, bool]:
    term, wish, is_terminal, has_bar = request.param
    monkeypatch.setenv("TERM", term)
    if wish is not None:
        monkeypatch.setenv("AXSPARSE_PROGRESS", wish)
    return TerminalStream() if is_terminal else FlushedStream(), has_bar


def test_the_terminal_decides_on_the_bar_unless_the_user_does(
    choice: tuple[FlushedStream, bool],
) -> None:
    stream, has_bar = choice

    make_console(stream).progress(1, 2, "loss")

    assert ("1/2  loss" in stream.seen) == has_bar


def test_a_rank_that_ends_the_job_erases_the_bar_where_there_may_be_one(
    choice: tuple[FlushedStream, bool],
) -> None:
    stream, has_bar = choice

    erase_bar(stream)

    assert stream.seen == "\x1b[J" * has_bar


@pytest.mark.parametrize("variable", LAUNCHER_VARIABLES)
def test_under_a_launcher_no_rank_knows_of_a_terminal(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    stream = TerminalStream()

    make_console(stream).progress(1, 2, "loss")

    assert stream.seen == ""


def test_an_unknown_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXSPARSE_PROGRESS", "fancy")
    with pytest.raises(
        ConfigError,
        match=r"AXSPARSE_PROGRESS \(environment\): 'fancy' is no way to show progress; "
        "set bar or plain, or unset it to let the terminal decide",
    ):
        make_console(FlushedStream())


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
        (format_count(600_000), "600k"),
        (format_count(4_700_000), "4.7M"),
        (format_count(2.7e9), "2.7B"),
        (format_count(1e12), "1.0T"),
        (format_rate(3_100, "tokens"), "3.1k tokens/s"),
        (format_rate(12.3, "tokens"), "12 tokens/s"),
        (format_seconds(0), "00:00"),
        (format_seconds(12), "00:12"),
        (format_seconds(59.6), "01:00"),
        (format_seconds(3599), "59:59"),
        (format_seconds(3723), "1:02:03"),
        (format_seconds(360_000), "100:00:00"),
    ],
)
def test_figures_have_the_units_of_the_field(made: str, text: str) -> None:
    assert made == text


class Gone(io.StringIO):
    """A pipe whose reader went away."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_lost_screen_ends_no_run() -> None:
    console = Console(Gone(), bar=False)

    console.line("first")
    console.line("second")
    console.close()
