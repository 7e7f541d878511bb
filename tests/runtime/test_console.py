"""What the user sees: lines, the bar, and whether there is a terminal to draw it on."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from axsparse.runtime import console
from axsparse.runtime.console import (
    Console,
    erase_rows,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    launcher_terminal,
    make_console,
)
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.launcher import LAUNCHER_VARIABLES

CLEAR = "\r\x1b[J"
UP = "\x1b[1A\r"
"""Back to the empty row above one row."""


def sized(columns: int, lines: int = 24) -> os.terminal_size:
    return os.terminal_size((columns, lines))


class FlushedStream(io.StringIO):
    """A stream that knows what would have reached the screen."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


class TerminalStdout(io.StringIO):
    """A stdout that is a terminal of unknown size."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AXSPARSE_PROGRESS", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal() -> Iterator[str]:
    """The device of a terminal with 132 columns."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 132, 0, 0))
    yield os.ttyname(slave)
    os.close(slave)
    os.close(master)


# The stream


def test_a_log_gets_plain_lines_and_no_bar() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=False)

    screen.line("first")
    screen.progress(1, 2, "loss 3.9")
    screen.line("second")
    screen.close()

    assert stream.seen == "first\nsecond\n"


def test_a_terminal_gets_a_bar_with_its_step_and_text() -> None:
    stream = FlushedStream()

    Console(stream, bar=True, size=sized(40)).progress(3, 10, "loss 3.9")

    assert stream.seen == f"{CLEAR}\n███░░░░░░░ 3/10  loss 3.9{UP}"


def test_the_bar_is_redrawn_in_place() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=True, size=sized(10))

    screen.progress(1, 2, "a")
    screen.progress(2, 2, "b")

    assert stream.seen == f"{CLEAR}\n█░ 1/2  a{UP}{CLEAR}\n██ 2/2  b{UP}"


def test_a_line_goes_above_the_bar() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=True, size=sized(40))
    screen.progress(10, 10, "done")
    bar = stream.seen.removeprefix(CLEAR)

    screen.line("saved")

    assert stream.seen == f"{CLEAR}{bar}{CLEAR}saved\n{bar}"


def test_a_line_before_the_first_bar_clears_nothing() -> None:
    stream = FlushedStream()

    Console(stream, bar=True).line("axsparse")

    assert stream.seen == "axsparse\n"


def test_the_bar_never_reaches_the_last_column() -> None:
    stream = FlushedStream()

    Console(stream, bar=True, size=sized(40)).progress(1, 10, "x" * 200)

    assert len(stream.seen.removeprefix(f"{CLEAR}\n").removesuffix(UP)) == 39


def test_closing_takes_the_bar_away_for_good() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=True)
    screen.progress(1, 2, "")
    drawn = stream.seen

    screen.close()
    screen.line("the end")

    assert stream.seen == f"{drawn}{CLEAR}the end\n"


def test_the_bar_is_bold_and_dim_where_colour_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    stream = FlushedStream()

    Console(stream, bar=True, size=sized(10)).progress(1, 2, "a")

    assert stream.seen == f"{CLEAR}\n\x1b[1m█\x1b[0m\x1b[2m░\x1b[0m 1/2  a{UP}"


# Who looks


class FakeProc:
    """A /proc in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, pid: str, name: str, parent: int, stdout: str) -> None:
        (self.root / pid / "fd").mkdir(parents=True)
        (self.root / pid / "fd" / "1").symlink_to(stdout)
        (self.root / pid / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1\n")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def chain(proc: FakeProc, *above: tuple[str, str], own: str = "pipe:[7]") -> Path:
    """A python process below processes of these names and stdouts, nearest first."""
    proc.add("self", "python", 100 if above else 0, own)
    for number, (name, stdout) in enumerate(above):
        last = number == len(above) - 1
        proc.add(str(100 + number), name, 0 if last else 101 + number, stdout)
    return proc.root


@pytest.mark.parametrize(
    "names",
    [
        ("hydra_pmi_proxy", "mpirun"),
        ("hydra_pmi_proxy", "mpiexec.hydra"),
        ("hydra_pmi_proxy", "mpiexec"),
        ("prterun",),
        ("orterun",),
        ("prted", "prte"),
        ("orted", "mpirun"),
        ("wrapper.sh", "prterun"),
        ("a (mean) name", "mpirun"),
    ],
)
def test_the_terminal_of_the_topmost_launcher_counts(
    proc: FakeProc, names: tuple[str, ...], terminal: str
) -> None:
    *lower, top = names
    processes = [(name, "pipe:[8]") for name in lower] + [(top, terminal), ("bash", "/dev/null")]

    assert launcher_terminal(chain(proc, *processes)) == sized(132)


@pytest.mark.parametrize("stdout", ["/home/log", "pipe:[9]", "/dev/null"])
def test_a_launcher_that_writes_to_a_file_or_pipe_is_a_log(proc: FakeProc, stdout: str) -> None:
    assert launcher_terminal(chain(proc, ("mpirun", stdout))) is None


def test_only_the_nearest_launcher_counts(proc: FakeProc, terminal: str) -> None:
    root = chain(proc, ("mpirun", "pipe:[8]"), ("driver.py", terminal), ("mpirun", terminal))

    assert launcher_terminal(root) is None


def test_a_pseudo_terminal_of_our_own_does_not_make_the_launchers_pipe_a_screen(
    proc: FakeProc, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalStdout())

    assert launcher_terminal(chain(proc, ("prterun", "pipe:[8]"), own=terminal)) is None


def test_a_rank_that_writes_to_a_file_is_a_log(proc: FakeProc, terminal: str) -> None:
    root = chain(proc, ("hydra_pmi_proxy", "pipe:[8]"), ("mpirun", terminal), own="/home/rank0.log")

    assert launcher_terminal(root) is None


@pytest.mark.parametrize("daemon", ["hydra_pmi_proxy", "prted", "orted"])
def test_a_node_without_the_launcher_is_a_log(
    proc: FakeProc, daemon: str, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalStdout())

    assert launcher_terminal(chain(proc, (daemon, terminal), ("sshd", terminal))) is None


def test_the_terminal_does_not_stay_open(proc: FakeProc, terminal: str) -> None:
    root = chain(proc, ("mpirun", terminal))
    before = set(Path("/proc/self/fd").iterdir())

    launcher_terminal(root)

    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_terminal_that_cannot_be_opened_has_eighty_columns(proc: FakeProc) -> None:
    assert launcher_terminal(chain(proc, ("mpirun", "/dev/pts/no-such"))) == sized(80)


def test_a_terminal_that_does_not_tell_has_eighty_columns(proc: FakeProc) -> None:
    master, slave = os.openpty()  # its size is 0 × 0 until somebody sets it

    size = launcher_terminal(chain(proc, ("mpirun", os.ttyname(slave))))

    os.close(slave)
    os.close(master)
    assert size == sized(80)


@pytest.mark.parametrize(("stdout", "size"), [(TerminalStdout(), sized(80)), (io.StringIO(), None)])
def test_without_a_launcher_our_own_stdout_counts(
    proc: FakeProc,
    stdout: io.StringIO,
    size: os.terminal_size | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)

    assert launcher_terminal(chain(proc, ("bash", "/dev/pts/1"), own="/dev/pts/1")) == size


def test_without_proc_our_own_stdout_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalStdout())

    assert launcher_terminal(tmp_path) == sized(80)


@pytest.mark.parametrize("variable", LAUNCHER_VARIABLES)
def test_without_proc_our_own_stdout_counts_for_nothing_under_a_launcher(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalStdout())
    monkeypatch.setenv(variable, "0")

    assert launcher_terminal(tmp_path) is None


# The choice


def drawn(wish: str | None, terminal: int | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a console shows of a bar, given AXSPARSE_PROGRESS and the terminal's columns."""
    if wish is not None:
        monkeypatch.setenv("AXSPARSE_PROGRESS", wish)
    size = None if terminal is None else sized(terminal)
    monkeypatch.setattr(console, "launcher_terminal", lambda: size)
    stream = FlushedStream()
    make_console(stream).progress(1, 2, "x" * 200)
    return stream.seen.removeprefix(f"{CLEAR}\n").removesuffix(UP)


@pytest.mark.parametrize(
    ("wish", "terminal", "width"),
    [
        (None, 50, 49),
        (None, None, 0),
        ("", 50, 49),
        ("bar", 50, 49),
        ("bar", None, 79),
        ("plain", 50, 0),
        ("plain", None, 0),
    ],
)
def test_the_terminal_decides_on_the_bar_unless_the_user_does(
    wish: str | None, terminal: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(drawn(wish, terminal, monkeypatch)) == width


@pytest.mark.parametrize(
    ("term", "wish", "width"), [("dumb", None, 0), ("dumb", "bar", 49), ("xterm", None, 49)]
)
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    term: str, wish: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)

    assert len(drawn(wish, 50, monkeypatch)) == width


def test_the_width_is_asked_for_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = iter([90, 50, 30])
    monkeypatch.setattr(console, "launcher_terminal", lambda: sized(next(widths)))
    stream = FlushedStream()

    screen = make_console(stream)  # this takes the first
    screen.progress(1, 2, "x" * 200)
    screen.progress(1, 2, "x" * 200)

    rows = [text.removesuffix(UP) for text in stream.seen.split(f"{CLEAR}\n")[1:]]
    assert list(map(len, rows)) == [49, 29]


@pytest.mark.parametrize(
    ("terminal", "term", "seen"),
    [(sized(50), "xterm", "\x1b[J"), (sized(50), "dumb", ""), (None, "xterm", "")],
)
def test_a_rank_that_ends_the_job_erases_rows_where_there_may_be_any(
    terminal: os.terminal_size | None, term: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(console, "launcher_terminal", lambda: terminal)
    stream = FlushedStream()

    erase_rows(stream)

    assert stream.seen == seen


def test_an_unknown_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"AXSPARSE_PROGRESS \(environment\): 'fancy' is no way to show progress; "
        "set bar or plain, or unset it to let the terminal decide",
    ):
        drawn("fancy", None, monkeypatch)


# Figures


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (11_400_000, "11.4 MB"),
        (99_949_999, "99.9 MB"),
        (99_950_000, "100 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1.0 GB"),
        (43_200_000_000_000, "43.2 TB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_bytes_have_decimal_units(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(17, "17"), (600_000, "600k"), (4_700_000, "4.7M"), (2.7e9, "2.7B"), (1e12, "1.0T")],
)
def test_counts_have_the_suffixes_of_the_field(n: float, text: str) -> None:
    assert format_count(n) == text


@pytest.mark.parametrize(("rate", "text"), [(3_100, "3.1k tokens/s"), (12.3, "12 tokens/s")])
def test_rates_are_in_tokens(rate: float, text: str) -> None:
    assert format_rate(rate, "tokens") == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0, "00:00"),
        (12, "00:12"),
        (59.6, "01:00"),
        (3599, "59:59"),
        (3723, "1:02:03"),
        (360_000, "100:00:00"),
    ],
)
def test_seconds_read_as_a_clock(s: float, text: str) -> None:
    assert format_seconds(s) == text


class Gone(io.StringIO):
    """A pipe whose reader went away."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_lost_screen_ends_no_run() -> None:
    console = Console(Gone(), bar=False)

    console.line("first")
    console.line("second")
    console.close()
