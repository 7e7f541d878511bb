"""What rank 0 shows of a run: a line for a step and an evaluation, and on a terminal some rows
below these lines, with bar, loss, phases and the slowest rank."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median

from axsparse.observe.metrics import StepRecord
from axsparse.observe.phases import PHASES
from axsparse.runtime.console import Unit, bar, format_rate, format_seconds

WINDOW = 10
"""Steps over which phases and ranks are averaged."""
MOST_LOSSES = 1000
"""Steps whose losses the sparkline can show."""
LEVELS = "▁▂▃▄▅▆▇█"
LEAST_SPARKS, MOST_SPARKS = 8, 48
"""Columns of the sparkline."""
LEAST_SHARE = 0.005
"""The part of a step from which on a phase is shown."""


def step_line(record: StepRecord, steps: int, eta: float | None, unit: Unit) -> str:
    """One of the run's `steps` on one line.

    `eta` is the time to the end of the run in seconds; None at the first step, which also
    compiles and allocates, so that it says nothing about the others.
    """
    later = "eta after the next steps: the first one also compiles"
    line = (
        f"step {record.step}/{steps}  loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  "
        f"bubble {100 * (record.bubble_seconds / record.step_seconds):.0f} %  "
        f"{format_rate(record.tokens_per_second, unit)}  "
        f"{later if eta is None else f'eta {format_seconds(eta)}'}"
    )
    return f"{line}  skipped {record.skipped_steps}" if record.skipped_steps else line


def eval_line(
    step: int, steps: int, loss: float, metrics: Mapping[str, float], part: str = ""
) -> str:
    """One evaluation on one line; every metric but perplexity is a fraction of the targets.

    `part` says how much of the validation data it was made on, if that was not all.
    """
    shown = "".join(
        f"  {name} {value:.3f}" if name == "perplexity" else f"  {name} {100 * value:.2f} %"
        for name, value in metrics.items()
    )
    return f"step {step}/{steps}  validation loss {loss:.4f}{shown}{part and f'  ({part})'}"


class LiveView:
    """Remembers the last steps and makes rows of them, for any width of the terminal."""

    def __init__(self, steps: int, unit: Unit, places: Sequence[str] = ()) -> None:
        """`places` names every rank, such as "rank 3 (stage 1, replica 1)"; with fewer than two,
        no rank is the slowest."""
        self._steps = steps
        self._unit = unit
        self._places = places
        self._records: deque[StepRecord] = deque(maxlen=WINDOW)
        self._losses: deque[float] = deque(maxlen=MOST_LOSSES)
        self._compute: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._eta: float | None = None

    def add(self, record: StepRecord, compute: Sequence[float], eta: float | None) -> None:
        """Take a step: its record, the seconds that each rank computed, and the time to the end,
        which is None at the first step."""
        if eta is not None and self._eta is None:  # the first step counts in no mean
            self._records.clear()
            self._compute.clear()
        self._records.append(record)
        self._losses.append(record.loss)
        self._compute.append(compute)
        self._eta = eta

    def rows(self, columns: int) -> list[str]:
        """The rows, each shorter than `columns`; none before the first step."""
        if not self._records:
            return []
        return [row for row in self._all_rows(columns - 1) if row]

    def _all_rows(self, width: int) -> Iterator[str]:
        last = self._records[-1]
        head = f"{bar(last.step, self._steps, width)} {last.step}/{self._steps}"
        rate = format_rate(fmean(r.tokens_per_second for r in self._records), self._unit)
        skipped = [f"skipped {last.skipped_steps}"] if last.skipped_steps else []
        eta = "compiling" if self._eta is None else f"eta {format_seconds(self._eta)}"
        yield fitted([head, eta, rate, *skipped], width)
        loss = f"loss {last.loss:.3f}"
        room = min(width - len(loss) - 1, MOST_SPARKS)
        drawn = sparkline(self._losses, room) if room >= LEAST_SPARKS else ""
        yield fitted([f"{loss} {drawn}".rstrip(), f"grad norm {last.grad_norm:.2f}"], width)
        yield fitted(self._phases(), width)
        yield fitted(self._slowest(), width)

    def _phases(self) -> list[str]:
        """The parts of the last steps that phases took, the longest first."""
        records = [asdict(record) for record in self._records]
        total = sum(record["step_seconds"] for record in records)
        shares = {
            name: sum(record[f"{name}_seconds"] for record in records) / total for name in PHASES
        }
        longest = sorted(shares, key=lambda name: -shares[name])
        return [
            f"{name} {100 * shares[name]:.0f} %" for name in longest if shares[name] >= LEAST_SHARE
        ]

    def _slowest(self) -> list[str]:
        """The rank that computes longest, beside the middle one; nothing of a single rank."""
        if len(self._places) < 2:
            return []
        each = [fmean(seconds) for seconds in zip(*self._compute, strict=True)]
        slowest = max(range(len(each)), key=each.__getitem__)
        return [
            f"slowest {self._places[slowest]}",
            f"computes {each[slowest]:.3g} s",
            f"median {median(each):.3g} s",
        ]


def fitted(fields: Sequence[str], width: int) -> str:
    """The first fields that fit into a width, two blanks between them; else part of the first."""
    row = fields[0][:width] if fields else ""
    for field in fields[1:]:
        if len(row) + 2 + len(field) > width:
            break
        row += f"  {field}"
    return row


def sparkline(values: Sequence[float] | deque[float], columns: int) -> str:
    """Values as bars of eight heights, the last one at the right; each column has the mean of as
    many, and one that is not a number is a blank."""
    if not values:
        return ""
    count = min(columns, len(values))
    bounds = [len(values) * column // count for column in range(count + 1)]
    listed = list(values)
    means = [fmean(listed[a:b]) for a, b in itertools.pairwise(bounds)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return " " * count
    low, high = min(finite), max(finite)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        LEVELS[round((mean - low) * scale)] if abs(mean) < float("inf") else " " for mean in means
    )
