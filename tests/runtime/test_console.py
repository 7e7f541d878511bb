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
from support.terminal import Terminal

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


def test_closing_takes_the_bar_away_for_good() -> None:
    stream = FlushedStream()
    screen = Console(stream, bar=True)
    screen.progress(1, 2, "")
    drawn = stream.seen

    screen.close()
    screen.line("the end")

    assert stream.seen == f"{drawn}{CLEAR}the end\n"


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


TERMINAL = "the terminal"
"""Stands for the path of the terminal's device."""


@pytest.mark.parametrize(
    ("above", "own"),
    [
        *(([("mpirun", stdout)], "pipe:[7]") for stdout in ("/home/log", "pipe:[9]", "/dev/null")),
        # Only the nearest launcher counts.
        ([("mpirun", "pipe:[8]"), ("driver.py", TERMINAL), ("mpirun", TERMINAL)], "pipe:[7]"),
        # A pseudo-terminal of our own does not make the launcher's pipe a screen.
        ([("prterun", "pipe:[8]")], TERMINAL),
        # This rank writes to a file.
        ([("hydra_pmi_proxy", "pipe:[8]"), ("mpirun", TERMINAL)], "/home/rank0.log"),
        # The launcher runs on another node.
        *(([(name, TERMINAL), ("sshd", TERMINAL)], "pipe:[7]") for name in console.DAEMONS),
    ],
)
def test_output_that_no_user_looks_at_is_a_log(
    proc: FakeProc,
    above: list[tuple[str, str]],
    own: str,
    terminal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalStdout())
    path = {TERMINAL: terminal}
    processes = [(name, path.get(stdout, stdout)) for name, stdout in above]

    assert launcher_terminal(chain(proc, *processes, own=path.get(own, own))) is None


def test_the_terminal_does_not_stay_open(proc: FakeProc, terminal: str) -> None:
    root = chain(proc, ("mpirun", terminal))
    before = set(Path("/proc/self/fd").iterdir())

    launcher_terminal(root)

    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_terminal_that_does_not_tell_has_eighty_columns(proc: FakeProc) -> None:
    master, slave = os.openpty()  # its size is 0 × 0 until somebody sets it

    size = launcher_terminal(chain(proc, ("mpirun", os.ttyname(slave))))

    os.close(slave)
    os.close(master)
    assert size == sized(80)
    (proc.root / "100" / "fd" / "1").unlink()
    (proc.root / "100" / "fd" / "1").symlink_to("/dev/pts/no-such")
    assert launcher_terminal(proc.root) == sized(80), "it cannot be opened"


@pytest.mark.parametrize(("stdout", "size"), [(TerminalStdout(), sized(80)), (io.StringIO(), None)])
def test_without_a_launcher_our_own_stdout_counts(
    proc: FakeProc,
    stdout: io.StringIO,
    size: os.terminal_size | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)

    assert launcher_terminal(chain(proc, ("bash", "/dev/pts/1"), own="/dev/pts/1")) == size


@pytest.mark.parametrize("variable", [None, *LAUNCHER_VARIABLES])
def test_without_proc_our_own_stdout_counts_unless_a_launcher_copies_it(
    tmp_path: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TerminalStdout())
    if variable is not None:
        monkeypatch.setenv(variable, "0")

    assert launcher_terminal(tmp_path) == (sized(80) if variable is None else None)


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
    ("term", "wish", "terminal", "width"),
    [
        ("xterm", None, 50, 49),
        ("xterm", None, None, 0),
        ("xterm", "", 50, 49),
        ("xterm", "bar", 50, 49),
        ("xterm", "bar", None, 79),
        ("xterm", "plain", 50, 0),
        # It cannot move its cursor.
        ("dumb", None, 50, 0),
        ("dumb", "bar", 50, 49),
    ],
)
def test_the_terminal_decides_on_the_bar_unless_the_user_does(
    term: str,
    wish: str | None,
    terminal: int | None,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", term)

    assert len(drawn(wish, terminal, monkeypatch)) == width


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
