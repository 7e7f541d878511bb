"""Our split and whole backwards beside torch's pipeline schedules, on the peers' model.

    python benchmarks/zero_bubble_peers.py --save benchmarks/results/zero_bubble_peers.json

Every round starts each contender once, in an order that is reversed every other time. Steps of a
round are compared by their median, and by the shortest, which others on the machine lengthen least.
Losses of all contenders have to agree. torch's zero-bubble schedules have two stages on each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from host_machine import host_machine
from peers.launch import Failure, launch
from peers.workload import SIZES, Case, Run, Size

OURS = "axsparse message-driven, whole"
CONTENDERS = {
    OURS: ("axsparse", "whole"),
    "axsparse message-driven, split": ("axsparse", "split"),
    "torch Schedule1F1B": ("pipelining", ""),
    "torch ScheduleInterleavedZeroBubble": ("zero-bubble", "ScheduleInterleavedZeroBubble"),
    "torch ScheduleZBVZeroBubble": ("zero-bubble", "ScheduleZBVZeroBubble"),
    "torch ScheduleDualPipeV": ("zero-bubble", "ScheduleDualPipeV"),
}
AGREE = 2e-3
"""Losses of a step may differ by this part: orders of additions differ."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="part of the contenders' names")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds of one start")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    size = replace(SIZES[arguments.size], tokens=arguments.tokens, blocks=arguments.blocks)
    found = measured(arguments, size)
    rows = {name: row(results, found[OURS]) for name, results in found.items()}
    for name, each in rows.items():
        print(f"{name}: {json.dumps(each)}")
    key = (
        f"{arguments.stages} ranks, {size.blocks} blocks of width {size.width}, {size.tokens} "
        f"tokens, {size.vocabulary} words, {size.microbatches} microbatches, {arguments.precision}"
    )
    if arguments.save:
        old = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
        old[key] = {"machine": host_machine(), "load": os.getloadavg(), "contenders": rows}
        arguments.save.write_text(json.dumps(old, indent=1) + "\n")


def measured(arguments: argparse.Namespace, size: Size) -> dict[str, list[dict[str, Any] | str]]:
    """What each contender measured in every round, or the last line that it said."""
    found: dict[str, list[dict[str, Any] | str]] = {
        name: [] for name in CONTENDERS if name == OURS or arguments.only in name
    }
    for number in range(arguments.rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            if found[name] and isinstance(found[name][-1], str):
                continue  # It does not run.
            framework, variant = CONTENDERS[name]
            case = Case(name, framework, arguments.stages, 1, variant=variant)  # type: ignore[arg-type]
            run = Run(case, size, arguments.precision, arguments.steps, warmup=2)
            result = launch(run, arguments.timeout)
            if isinstance(result, Failure):
                said = [line for line in result.output.splitlines() if line.strip()]
                found[name].append(f"{result.reason}: {said[-1] if said else ''}"[:300])
            else:
                found[name].append(result)
            print(f"round {number}: {name}", file=sys.stderr, flush=True)
    return found


def row(
    results: Sequence[dict[str, Any] | str], ours: Sequence[dict[str, Any] | str]
) -> dict[str, Any]:
    """Medians of one contender, and its steps over those of our whole backwards, round by round."""
    for result in results:
        if isinstance(result, str):
            return {"does not run": result}
    ran = [each for each in results if isinstance(each, dict)]
    base = [each for each in ours if isinstance(each, dict)]
    for one, other in zip(ran, base, strict=True):
        for loss, wanted in zip(one["losses"], other["losses"], strict=True):
            if abs(loss - wanted) > AGREE * abs(wanted):
                return {"trains something else": [one["losses"], other["losses"]]}
    pairs = list(zip(ran, base, strict=True))
    return {
        "step_ms": round(1e3 * median(each["median_seconds"] for each in ran), 1),
        "shortest_ms": round(1e3 * min(min(each["seconds"]) for each in ran), 1),
        "cpu_ms": round(1e3 * median(each["cpu_seconds"] for each in ran), 1),
        "over_ours_whole": [round(a["median_seconds"] / b["median_seconds"], 3) for a, b in pairs],
        "shortest_over_shortest": round(
            min(min(a["seconds"]) for a in ran) / min(min(b["seconds"]) for b in base), 3
        ),
        "others_took": [each["foreign_share"] for each in ran],
        "losses": ran[0]["losses"],
    }


if __name__ == "__main__":
    main()
