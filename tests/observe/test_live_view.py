"""The live view, in a pseudo-terminal of the system at several widths and while it is resized."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.pages import STEP_RECORD
from support.terminal import Terminal

from axsparse.observe.live_view import LiveView, eval_line, fitted, sparkline, step_line
from axsparse.observe.metrics import StepRecord
from axsparse.observe.phases import PHASES
from axsparse.runtime.console import Console

PLACES = [f"rank {rank} (stage {rank % 2}, replica {rank // 2})" for rank in range(4)]
SECONDS = dict.fromkeys([f"{name}_seconds" for name in PHASES], 0.0)


def record(step: int, loss: float = 2.0) -> StepRecord:
    """A step of one second: six tenths of computing, three of waiting, one of messages."""
    times: dict[str, Any] = {
        **SECONDS,
        "compute_seconds": 0.6,
        "bubble_seconds": 0.3,
        "p2p_seconds": 0.1,
    }
    return replace(
        STEP_RECORD,
        step=step,
        loss=loss,
        grad_norm=1.25,
        step_seconds=1.0,
        tokens_per_second=1000.0,
        **times,
    )


def view_of(steps: int = 40, of: int = 80) -> LiveView:
    """A view after some steps, in which rank 2 is slow and the loss falls from 4 to 2."""
    view = LiveView(of, "tokens", PLACES)
    for step in range(1, steps + 1):
        view.add(record(step, 4.0 - 2.0 * step / steps), [0.5, 0.5, 0.75, 0.4], 40.0)
    return view


@pytest.fixture(params=[True, False], ids=["folding", "cutting"])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    made = Terminal(100, folds_anew=request.param)
    yield made
    made.close()


def console_of(terminal: Terminal) -> Console:
    def size() -> os.terminal_size:
        return os.get_terminal_size(terminal.slave)

    return Console(terminal.open(), bar=True, size=size)


def test_all_that_fits_is_shown_and_whole_fields_are_left_out(terminal: Terminal) -> None:
    console = console_of(terminal)
    console.line("axsparse")

    console.live(view_of().rows)
    shown = terminal.read()
    terminal.resize(60)
    console.live(view_of().rows)
    narrow = terminal.read()

    assert shown[:3] == [
        *("axsparse", "", "████████████░░░░░░░░░░░░ 40/80  eta 00:40  1.0k tokens/s")
    ]
    assert shown[3].startswith("loss 2.000 █") and shown[3].endswith("▁  grad norm 1.25")
    assert shown[4:] == [
        "compute 60 %  bubble 30 %  p2p 10 %",
        "slowest rank 2 (stage 0, replica 1)  computes 0.75 s  median 0.5 s",
    ]
    assert narrow[2] == "███████░░░░░░░ 40/80  eta 00:40  1.0k tokens/s"
    assert narrow[5] == "slowest rank 2 (stage 0, replica 1)  computes 0.75 s"
    assert max(map(len, narrow)) < 60


def test_a_terminal_that_changes_in_mid_run_stays_clean(terminal: Terminal) -> None:
    console, view = console_of(terminal), LiveView(80, "tokens", PLACES)
    widths = {10: 60, 15: 30, 20: 100, 25: 44, 30: 60}
    for step in range(1, 41):
        view.add(record(step), [0.5, 0.5, 0.75, 0.4], 40.0)
        console.live(view.rows)
        if step % 10 == 0:
            console.line(f"line {step}")
        if step in widths:
            terminal.resize(widths[step])

    shown = terminal.read()

    assert shown[:5] == ["line 10", "line 20", "line 30", "line 40", ""]
    assert len(shown) == 9  # and the four rows once
    assert shown[5].endswith("40/80  eta 00:40  1.0k tokens/s")
    console.close()
    assert terminal.read() == ["line 10", "line 20", "line 30", "line 40"]


def test_a_terminal_that_is_too_low_has_as_many_rows_as_fit(terminal: Terminal) -> None:
    console, view = console_of(terminal), LiveView(80, "tokens", PLACES)
    heights = {10: 3, 20: 1, 30: 24}
    for step in range(1, 41):
        view.add(record(step), [0.5, 0.5, 0.75, 0.4], 40.0)
        console.live(view.rows)
        if step % 10 == 5:
            console.line(f"line {step}")
            assert sum("eta" in row for row in terminal.read()) == (step != 25)
        if step in heights:
            terminal.resize(100, heights[step])

    assert terminal.read()[:4] == ["line 5", "line 15", "line 25", "line 35"]
    console.close()
    assert terminal.read() == ["line 5", "line 15", "line 25", "line 35"]


def test_what_other_processes_print_stands_by_itself(terminal: Terminal) -> None:
    console, view = console_of(terminal), view_of()
    console.line("before")
    console.live(view.rows)

    other = terminal.open()
    other.write("axsparse: warning: of another rank\n")
    other.flush()
    console.live(view.rows)
    console.line("after")

    shown = terminal.read()
    assert shown[:4] == ["before", "axsparse: warning: of another rank", "after", ""]
    assert len(shown) == 8


def test_one_rank_is_not_the_slowest_and_what_is_skipped_is_told() -> None:
    view = LiveView(10, "samples", PLACES[:1])
    assert view.rows(80) == []

    view.add(replace(record(1), skipped_steps=3), [0.5], 9.0)

    rows = view.rows(80)
    assert len(rows) == 3
    assert rows[0].endswith("1/10  eta 00:09  1.0k samples/s  skipped 3")


@pytest.mark.parametrize("columns", [2, 10, 19, 20, 21, 40, 79, 200])
def test_no_row_reaches_the_last_column(columns: int) -> None:
    assert all(len(row) < columns for row in view_of().rows(columns))


@pytest.mark.parametrize(
    ("values", "columns", "line"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([2.0, 2.0], 5, "▁▁"),
        ([0.0, 1.0, 2.0, 7.0], 5, "▁▂▃█"),
        ([0.0, 2.0, 6.0, 8.0], 2, "▁█"),
        ([0.0, math.nan, 1.0], 5, "▁ █"),
        ([math.inf, math.nan], 5, "  "),
    ],
)
def test_a_sparkline_goes_from_the_least_to_the_most(
    values: list[float], columns: int, line: str
) -> None:
    assert sparkline(values, columns) == line


def test_a_field_fits_or_is_left_out() -> None:
    assert fitted(["abc", "de", "f"], 7) == "abc  de"
    assert fitted(["abc", "def", "g"], 7) == "abc"
    assert fitted(["abcdefgh"], 5) == "abcde"
    assert fitted([], 5) == ""


def test_a_step_and_an_evaluation_read_as_one_line() -> None:
    step = replace(record(10, 3.9117), bubble_seconds=0.1799, tokens_per_second=3_120)

    assert step_line(step, steps=30, eta=12.4, unit="samples") == (
        "step 10/30  loss 3.912  grad norm 1.25  bubble 18 %  3.1k samples/s  eta 00:12"
    )
    metrics = {"perplexity": 3.43689, "top1": 0.98765}
    assert eval_line(10, 30, 1.23456, metrics, "256 of 360 samples") == (
        "step 10/30  validation loss 1.2346  perplexity 3.437  top1 98.77 %  (256 of 360 samples)"
    )


def test_the_first_step_which_also_compiles_counts_in_no_mean() -> None:
    view = LiveView(10, "tokens", PLACES)
    view.add(replace(record(1), tokens_per_second=1.0), [0.5, 0.5, 50.0, 0.4], None)
    assert "1/10  compiling  1 tokens/s" in view.rows(100)[0]

    view.add(record(2), [0.5, 0.6, 0.5, 0.4], 9.0)

    assert view.rows(100)[0].endswith("2/10  eta 00:09  1.0k tokens/s")
    assert "slowest rank 1" in view.rows(100)[3]
