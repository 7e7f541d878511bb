"""Every rank may take so much memory and no more: who trains the model at all, and how fast.

The budget lies between the dense state of the fullest of four and of three stages, and above SAMO's
state of the full model. It counts private writable memory (RLIMIT_DATA) beyond what a rank has
after it has trained a tiny model, so that interpreter, libraries and machine code are outside of
it, for every contender alike. Peers train dense, since masks only add memory.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.launch import Failure
from peers.measuring import Measured, Measuring, Result, rounds_of
from peers.ratios import agrees, difference, digits, ratio_of
from peers.workload import (
    DDP,
    DEEPSPEED,
    FSDP2,
    OURS_DENSE,
    OURS_SAMO,
    OURS_SHARDED,
    PIPELINING,
    PLAIN,
    PLAIN_MASKED,
    Case,
    Precision,
    Run,
    Size,
)

DENSE_BYTES = 16
"""Of state a parameter, trained dense in bf16 with fp32 masters: 2 + 2 + 4 + 8."""
ROOM = 24 * 2**20
"""Bytes for what is no state: stacks of threads, buffers of messages, activations."""
MOST_RANKS = 4
TRIAL_STEPS, WARMUP = 2, 1
PIPELINES = ((2, 1), (3, 1), (4, 1), (2, 2))
REPLICAS = ((1, 2), (1, 4))
CANDIDATES: Sequence[tuple[Case, Sequence[tuple[int, int]]]] = (
    (PLAIN, ((1, 1),)),
    (DDP, REPLICAS),
    *((case, REPLICAS) for case in FSDP2),
    (PIPELINING, PIPELINES),
    *((case, (*REPLICAS, *PIPELINES)) for case in DEEPSPEED),
    (OURS_DENSE, ((1, 1), *REPLICAS, *PIPELINES)),
    (OURS_SAMO, ((1, 1), *REPLICAS, *PIPELINES)),
    (OURS_SHARDED, REPLICAS),
)
"""Who tries which layouts, as stages and replicas."""


@dataclass(frozen=True)
class Settings:
    size: Size
    precision: Precision
    rounds: int
    steps: int
    skip: str = ""
    """Regular expression on names of cases that are left out."""


def budget_of(size: Size) -> int:
    """A budget in bytes between the dense state of the fullest of four and of three stages."""
    four, three = (_most_blocks(size, stages) for stages in (4, 3))
    return ROOM + int((four * three) ** 0.5 * size.block_parameters * DENSE_BYTES)


def _most_blocks(size: Size, stages: int) -> int:
    """Blocks of the fullest stage; first and last stage also have embedding and head."""
    first, *rest = size.split(stages)
    *middle, last = rest
    return max(first - 1, *middle, last - 1)


def candidates(settings: Settings) -> list[Case]:
    found = [
        case.at(stages, replicas)
        for case, layouts in CANDIDATES
        for stages, replicas in layouts
        if case.only in (None, settings.precision) and stages * replicas <= MOST_RANKS
    ]
    return [case for case in found if not (settings.skip and re.search(settings.skip, case.key))]


def measure_cap(measuring: Measuring, settings: Settings) -> dict[str, Any]:
    """Try all, then time the best layout of each contender in interleaved rounds."""
    budget = budget_of(settings.size)
    tried = {
        case: _try(
            measuring,
            Run(case, settings.size, settings.precision, TRIAL_STEPS, WARMUP, budget),
        )
        for case in candidates(settings)
    }
    best = _best(tried)
    references = {
        case.is_masked: measuring.result(
            Run(case, settings.size, settings.precision, settings.steps, WARMUP), 0
        )
        for case in (PLAIN, PLAIN_MASKED)
    }
    timed = Measured(settings.size, settings.precision)
    runs = {run.case: _longer(run, settings.steps) for run in best.values()}
    for case, number in rounds_of(list(runs), settings.rounds):
        timed.rows.setdefault(case, {})[number] = measuring.result(runs[case], number)
    return {
        "model": f"GPT, {settings.size.blocks} blocks of width {settings.size.width}",
        "parameters": settings.size.parameters,
        "precision": settings.precision,
        "budget_megabytes": round(budget / 1e6),
        "tried": [_tried_row(run, result) for run, result in tried.values()],
        "best": _best_rows(timed, runs, references),
    }


def _try(measuring: Measuring, run: Run) -> tuple[Run, Result]:
    """As glibc is set; where that takes too much memory, with freed blocks returned at once."""
    result = measuring.result(run, 0)
    # Without memory some libraries end with a custom message, or with a signal.
    if isinstance(result, Failure):
        again = _mapped(run)
        second = measuring.result(again, 0)
        if not isinstance(second, Failure):
            return again, second
    return run, result


def _mapped(run: Run) -> Run:
    return Run(run.case, run.size, run.precision, run.steps, run.warmup, run.budget, mapped=True)


def _longer(run: Run, steps: int) -> Run:
    return Run(run.case, run.size, run.precision, steps, WARMUP, run.budget, run.mapped)


def _best(tried: Mapping[Case, tuple[Run, Result]]) -> dict[str, Run]:
    """By contender, the run of its fastest layout and setting."""
    best: dict[str, tuple[float, Run]] = {}
    for case, (run, result) in tried.items():
        if isinstance(result, Failure):
            continue
        seconds = result["median_seconds"]
        if case.name not in best or seconds < best[case.name][0]:
            best[case.name] = (seconds, run)
    return {name: run for name, (_, run) in best.items()}


def _tried_row(run: Run, result: Result) -> dict[str, Any]:
    row: dict[str, Any] = {
        "contender": run.case.name,
        "variant": run.case.variant,
        "layout": run.case.layout,
    }
    if isinstance(result, Failure):
        return row | {"ran": False, "why": "no memory" if result.is_memory else result.reason}
    return row | {
        "ran": True,
        "memory_returned_at_once": run.mapped,
        "steps_a_second": round(1 / result["median_seconds"], 4),
    }


def _best_rows(
    timed: Measured, runs: Mapping[Case, Run], references: Mapping[bool, Result]
) -> list[dict[str, Any]]:
    samo = next((case for case in timed.rows if case.name == OURS_SAMO.name), None)
    rows = []
    for case in timed.rows:
        row: dict[str, Any] = {
            "contender": case.name,
            "variant": case.variant,
            "layout": case.layout,
            "memory_returned_at_once": runs[case].mapped,
        }
        rows.append(row)
        good, reference = timed.good(case), references[case.is_masked]
        if len(good) < len(timed.rows[case]):
            row["does not count"] = "ran in the trial, and not in every round"
            continue
        if isinstance(reference, Failure):
            row["does not count"] = "plain torch without a cap did not run to judge the losses"
            continue
        worst = max(difference(found["losses"], reference["losses"]) for found in good.values())
        if not agrees(worst, timed.precision):
            row["does not count"] = f"losses differ: {digits(worst)} digits"
            continue
        seconds = timed.seconds(case)
        row["steps_a_second"] = round(1 / statistics.median(seconds.values()), 4)
        row["losses_agree_to"] = digits(worst)
        if samo is not None and case is not samo:
            ratio = ratio_of(seconds, timed.seconds(samo))
            if ratio is not None:
                row["samo_is_times_as_fast"] = {n: round(v, 3) for n, v in vars(ratio).items()}
    return rows
