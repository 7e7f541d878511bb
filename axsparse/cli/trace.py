"""`axsparse trace compare`: prints where two traces of steps differ most."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from axsparse.cli.parser import CommandParser, say, whole
from axsparse.config.validate import counted
from axsparse.observe.trace_file import Span, phase_seconds, read, step_seconds
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import ConfigError

DESCRIPTION = """\
Compare two traces of steps: simulated, real, or one of each.

  axsparse plan --config my.yaml --gpus 8 --cluster my_cluster.yaml --trace simulated.json
  mpirun -n 8 axsparse train --config my.yaml --set train.trace=3
  axsparse trace compare simulated.json runs/my/trace/steps-2-4.json

Seconds are those of a step, the mean over replicas and steps. Perfetto (ui.perfetto.dev) opens
both files.
"""


def parser() -> CommandParser:
    """The command line."""
    group = CommandParser(prog="axsparse trace")
    purpose = "the largest differences by phase and stage"
    arguments = group.add_member("compare", _compare, help=purpose, description=DESCRIPTION)
    arguments.add_argument("first", metavar="A", type=Path, help="a trace")
    arguments.add_argument("second", metavar="B", type=Path, help="the trace to compare with A")
    arguments.add_argument(
        "--most",
        metavar="N",
        type=whole(0),
        default=10,
        help="differences to show (default %(default)s)",
    )
    return group


def _compare(arguments: argparse.Namespace) -> None:
    first, second = read(arguments.first), read(arguments.second)
    _refuse_other_layout(first, second)
    say("\n".join(lines(first, second, arguments.most)))


def _refuse_other_layout(first: Sequence[Span], second: Sequence[Span]) -> None:
    """ConfigError if the traces have different numbers of stages.

    Replicas are not compared: of equal ones the planner simulates only some.
    """
    ours, theirs = (len({span.stage for span in spans}) for spans in (first, second))
    if ours != theirs:
        raise ConfigError(
            f"trace compare: A has {counted(ours, 'stage')} and B {counted(theirs, 'stage')}, "
            "whose phases are not those of the same layers; compare traces of one layout: "
            "axsparse plan --set layout.g_inter=N simulates that of a run"
        )


def lines(first: Sequence[Span], second: Sequence[Span], most: int) -> Iterator[str]:
    """The printed lines: whole steps first, then the phases of stages that differ most."""
    ours, theirs = step_seconds(first), step_seconds(second)
    relative = f" ({100 * (theirs / ours - 1):+.1f} %)" if ours else ""
    yield f"step: A {ours:.4g} s, B {theirs:.4g} s{relative}"
    here, there = phase_seconds(first), phase_seconds(second)
    # A stage or phase that is missing in one counts as 0.
    longer = {key: there.get(key, 0.0) - here.get(key, 0.0) for key in sorted({*here, *there})}
    rows = [
        {
            "stage": str(stage),
            "phase": phase,
            "A s": f"{here.get((stage, phase), 0.0):.4g}",
            "B s": f"{there.get((stage, phase), 0.0):.4g}",
            "B − A": f"{seconds:+.4g}",
            "% of step": f"{100 * seconds / ours:+.1f}" if ours else "",
        }
        for (stage, phase), seconds in sorted(longer.items(), key=lambda item: -abs(item[1]))[:most]
    ]
    if rows:
        yield ""
        yield from table(rows)
