"""python -m peers: axsparse next to plain torch, DDP, FSDP2, pipelining and DeepSpeed.

`make bench-peers` makes the environment and calls this. Finished runs are kept in the log, so that
the same command continues where it was cut off.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import host_machine

from peers.cap import Settings, measure_cap
from peers.launch import CHECKOUT, EXTENSIONS
from peers.measuring import Measuring, RunLog, code_digest
from peers.report import write_report
from peers.times import measure_times, speedups, sum_squares, time_rows
from peers.workload import SIZES, Case, Precision, cases_for, missing_references

PARTS = ("times", "cap")
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
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
        "--tiny", action="store_true", help="every part on tiny models: does all of it run?"
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
        arguments.parts, arguments.sizes, arguments.precisions = ["times"], ["small"], ["bf16"]
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


class Comparison:
    """The requested comparison, measured part by part and reported after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._asked = arguments
        self._machine = host_machine()
        versions = " ".join(f"{name} {value}" for name, value in self._machine.items())
        self._measuring = Measuring(
            RunLog(arguments.log, code_digest(versions)),
            arguments.timeout,
            arguments.max_foreign,
            arguments.retries,
        )
        prefix = "tiny-" if arguments.tiny else ""
        self._cap = Settings(
            SIZES[f"{prefix}capped"], "bf16", arguments.rounds, arguments.steps, arguments.skip
        )
        self._result: dict[str, Any] = {"machine": self._machine, "note": NOTE}

    def run(self) -> list[Path]:
        """Everything; the report is written anew after every part."""
        written: list[Path] = []
        for part, measure in (
            ("times", self._times),
            ("cap", self._capped),
        ):
            if part in self._asked.parts:
                measure()
                written = write_report(self._result, self._asked.out, self._asked.name)
        return written

    def _times(self) -> None:
        asked = self._asked
        parts: list[dict[str, Any]] = []
        self._result["times"] = parts
        for name in asked.sizes:
            size = SIZES[name]
            for precision in asked.precisions:
                found = measure_times(
                    self._measuring,
                    size,
                    precision,
                    asked_cases(self._asked, precision),
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
                write_report(self._result, asked.out, asked.name)

    def _capped(self) -> None:
        self._result["cap"] = measure_cap(self._measuring, self._cap)


def main() -> int:
    arguments = choose(parse_arguments())
    for precision in arguments.precisions if "times" in arguments.parts else ():
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
        written = Comparison(arguments).run()
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
