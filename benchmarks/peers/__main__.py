"""python -m peers: axsparse next to plain torch, DDP, FSDP2, pipelining and DeepSpeed.

`make bench-peers` makes the environment and calls this. Finished runs are kept in the log, so that
the same command continues where it was cut off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import host_machine

from peers.launch import CHECKOUT, EXTENSIONS
from peers.measuring import (
    Measuring,
    RunLog,
    code_digest,
    measure_times,
    speedups,
    sum_squares,
    time_rows,
)
from peers.workload import SIZES, Case, Precision, cases_for, missing_references

Row = Mapping[str, Any]


def write_report(result: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write both and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = (folder / f"{name}{suffix}" for suffix in (".json", ".md"))
    data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(result), encoding="utf-8")
    return [data, page]


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    machine = result["machine"]
    lines = [
        "# axsparse beside its peers",
        "",
        "; ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        result["note"],
        "",
    ]
    for part in result["times"]:
        lines += _times(part)
    return "\n".join(lines).rstrip() + "\n"


def _times(part: Row) -> list[str]:
    title = f"## {part['size']}, {part['precision']}"
    head = (
        f"{part['parameters'] / 1e6:.1f} M parameters, of which SAMO keeps "
        f"{part['kept'] / part['parameters']:.2f}; {part['rounds']} rounds of {part['steps']} steps"
    )
    rows = []
    for row in part["rows"]:
        name = _name(row)
        if "does not count" in row:
            rows.append([name, row["layout"], f"does not count: {row['does not count']}"])
            continue
        rows.append(
            [
                name,
                row["layout"],
                _text(row["milliseconds"], 0),
                _text(row["to_plain"]),
                _text(row["to_dense_peer_of_layout"]),
                row["losses_agree_to"] or "(none)",
                f"{row['cpu_seconds_a_step']:.2f}",
                "/".join(f"{value:.0f}" for value in row["peak_megabytes_above_libraries"]),
                f"{row['foreign_share']:.0%}",
            ]
        )
    titles = [
        *("contender", "stages × replicas", "ms a step", "to plain", "to dense peer"),
        *("digits of losses", "CPU s a step", "peak MB a rank", "others took"),
    ]
    faster = [
        [
            f"{r['ours']} over {_name({'contender': r['peer'], 'variant': r['setting']})}",
            r["layout"].replace("x", " × "),
            _text(r["times_as_fast"]),
        ]
        for r in part["speedups"]
    ]
    return [
        *(title, "", head, "", *_table(titles, rows), ""),
        *_table(["times as fast", "stages × replicas", "ratio"], faster),
        "",
    ]


def _name(row: Row) -> str:
    return f"{row['contender']} ({row['variant']})" if row["variant"] else row["contender"]


def _text(figure: Row | None, digits: int = 2) -> str:
    if figure is None:
        return ""
    middle, low, high = (f"{figure[name]:.{digits}f}" for name in ("median", "least", "most"))
    return middle if low == high else f"{middle} [{low}, {high}]"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; short rows are filled up."""
    full = [[*row, *[""] * (len(titles) - len(row))] for row in rows]
    return [
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(row)} |" for row in full),
    ]


LAYOUTS = ("1x1", "1x2", "2x1", "2x2")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
WORK = CHECKOUT / ".bench-peers"
QUICK_SKIPS = "resharded|gathered, bf16|DeepSpeed 1x2$|DeepSpeed 2|1F1B, masked|sharded 2x2"
"""Cases that the quick selection leaves out."""
NOTE = (
    "A step ends when it has ended on the last rank. Ratios are taken within a round: median "
    "[least, most] over the rounds, whose order is reversed every other time. Of contenders with "
    "several settings the fastest counts. Losses of every step agree with plain torch's (masked "
    "runs: with plain torch that masks after the step) to the digits shown; times of others do "
    "not count. `others took` is the share of the machine that other processes had."
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "wide"])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed, in each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--skip", default="", help="regular expression on names of cases")
    parser.add_argument(
        "--quick", action="store_true", help="times of the small size in bf16, most cases"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="everything on tiny models: does all of it run?"
    )
    parser.add_argument("--max-foreign", type=float, default=0.05, metavar="SHARE")
    parser.add_argument("--retries", type=int, default=1, help="if others took more than SHARE")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one run")
    parser.add_argument("--log", type=Path, default=WORK / "runs.jsonl")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "benchmarks" / "results")
    parser.add_argument("--name", default="", help="of the files; peers, peers_quick, peers_tiny")
    arguments = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("steps", 2), ("warmup", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: give at least {least}")
    try:
        re.compile(arguments.skip)
    except re.error as error:
        parser.error(f"--skip {arguments.skip!r}: {error}; give a regular expression")
    return arguments


def choose(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments that --quick and --tiny stand for."""
    if arguments.quick:
        arguments.sizes, arguments.precisions = ["small"], ["bf16"]
        arguments.rounds, arguments.steps, arguments.warmup = 2, 4, 1
        arguments.retries = 0
        arguments.skip = "|".join(filter(None, [arguments.skip, QUICK_SKIPS]))
    if arguments.tiny:
        arguments.sizes, arguments.retries = ["tiny"], 0
        arguments.rounds, arguments.steps, arguments.warmup = 2, 2, 1
    mode = "_quick" if arguments.quick else "_tiny" if arguments.tiny else ""
    arguments.name = arguments.name or f"peers{mode}"
    return arguments


def asked_cases(arguments: argparse.Namespace, precision: Precision) -> list[Case]:
    """The cases of the layouts that are asked for, without those to skip."""
    cases, skip = cases_for(arguments.layouts, precision), arguments.skip
    return [case for case in cases if not (skip and re.search(skip, case.key))]


def compare(asked: argparse.Namespace) -> list[Path]:
    """Measure all that is asked; the report is written anew after each size and precision."""
    machine = host_machine()
    log = RunLog(asked.log, code_digest(" ".join(f"{name} {it}" for name, it in machine.items())))
    measuring = Measuring(log, asked.timeout, asked.max_foreign, asked.retries)
    parts: list[dict[str, Any]] = []
    written: list[Path] = []
    for name, precision in itertools.product(asked.sizes, asked.precisions):
        size = SIZES[name]
        found = measure_times(
            measuring,
            size,
            precision,
            asked_cases(asked, precision),
            rounds=asked.rounds,
            steps=asked.steps,
            warmup=asked.warmup,
        )
        for case, reason in sum_squares(found).items():
            print(f"{case.key}: does not count: {reason}", file=sys.stderr)
        parts.append(
            {
                "size": name,
                "precision": precision,
                "parameters": size.parameters,
                "kept": size.kept,
                "rounds": asked.rounds,
                "steps": asked.steps,
                "rows": time_rows(found),
                "speedups": speedups(found),
            }
        )
        result = {"machine": machine, "note": NOTE, "times": parts}
        written = write_report(result, asked.out, asked.name)
    return written


def main() -> int:
    arguments = choose(parse_arguments())
    for precision in arguments.precisions:
        if missing := missing_references(asked_cases(arguments, precision)):
            print(
                f"peers: error: --skip {arguments.skip!r} leaves out {' and '.join(missing)}, "
                "whose losses judge those of the others; give an expression that does not match it",
                file=sys.stderr,
            )
            return 2
    # DeepSpeed compiles what moves data between processes, once.
    os.environ[EXTENSIONS] = str(WORK / "torch_extensions")
    # A comparison that is ended ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        written = compare(arguments)
    except LookupError as error:
        print(f"peers: error: {error.args[0]}; look at the failures above", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("peers: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
