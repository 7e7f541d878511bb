"""How long steps take whose backwards are split, by schedule: published times, jitter, chunks.

    python benchmarks/zero_bubble.py --save benchmarks/results/zero_bubble.json     (5 minutes)
    chrt --rr 5 mpirun -n 4 python -m mpi4py benchmarks/zero_bubble.py --save …      (5 minutes)

The second command emulates stages that sleep, over the real engine and MPI, and adds its part to
the file. All else is simulated with the package's own policies. `published` repeats table 5 of the
zero-bubble paper (Qi et al., 2024) from the times of its table 6. `jitter` draws a random factor
for each action and compares step times. `chunks` asks whether several pieces of the model on each
stage, as in Megatron-LM's interleaved order, still pay beside weight gradients. The Markdown of
the results is written beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from chunked_stages import chunked_seconds
from emulated import machine
from schedules import LAWS

from axsparse.pipeline.policy import Policy
from axsparse.pipeline.schedules import Schedule, ScheduleName
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.pipeline.zero_bubble import PATIENCES, Times
from axsparse.runtime.launcher import started_by_launcher

TIMES = Times(1.0, 1.0, 0.8, 0.05)
JITTER_LAWS = ("none", "exponential", "lognormal", "stalls")
MEANS = {"none": 1.0, "exponential": 1.0, "lognormal": 1.1331, "stalls": 1.2}
"""The mean factor of each law: what stages expect of each other."""
SIZES = {(4, 16): 20, (8, 32): 20, (16, 64): 10}
"""Stages and microbatches, and how many sets of delays are drawn."""
SLACKS = (0, 1, 2)
UNIT_SECONDS = 0.02
"""Of the emulated stages: long against the half millisecond that an action costs a busy host."""
OURS, STATIC = "ours", "zb-1p"
EMULATED = ("1f1b", "message-driven, whole", STATIC, "greedy", OURS)
CHUNKED = ("interleaved", "interleaved, split", "ours, 1p", "ours, 2p")
PUBLISHED = """\
1.5B  8  24 18.522 18.086  9.337 0.601 24 2304 0.2431 0.1585 0.1083 0.0433
1.5B  8  32 18.513 18.086  9.331 0.626 24 2304 0.1985 0.1242 0.0837 0.0039
1.5B  8  64 18.546 18.097  9.321 0.762 24 2304 0.1240 0.0674 0.0444 0.0026
6.2B  8  24 29.718 29.444 19.927 0.527 32 4096 0.2347 0.1323 0.0698 0.0029
6.2B  8  32 29.802 29.428 19.530 0.577 32 4096 0.1898 0.1045 0.0559 0.0022
6.2B  8  64 29.935 29.621 19.388 0.535 32 4096 0.1091 0.0554 0.0294 0.0010
14.6B 16 48 11.347 11.248  8.132 0.377 40 5120 0.2552 0.1397 0.0672 0.0066
14.6B 16 64 11.307 11.254  8.101 0.379 40 5120 0.2082 0.1088 0.0516 0.0054
14.6B 16 128 11.325 11.308 8.109 0.378 40 5120 0.1251 0.0576 0.0266 0.0028
28.3B 32 96 10.419 10.207  7.715 0.408 48 6144 0.2646 0.1421 0.0641 0.0038
28.3B 32 128 10.408 10.204 7.703 0.408 48 6144 0.2168 0.1106 0.0490 0.0029
28.3B 32 256 10.402 10.248 7.698 0.460 48 6144 0.1352 0.0594 0.0257 0.0018
"""
"""Model, stages, microbatches, T_F, T_B, T_W, T_comm (ms), heads, width (tables 3 and 6), and the
bubble rates of 1F1B, ZB-1p (and ZB-H1), ZB-H2 and ZB-2p (table 5)."""


def split(name: ScheduleName = "message-driven", slack: int = 0, **more: Any) -> Schedule:
    """A schedule of split backwards."""
    return Schedule(name, slack, "alternate", split_backward=True, **more)


def run(
    schedule: Schedule, parts: Durations, times: Times, expected: Durations | None = None
) -> PipelineRun:
    """One step. `parts` are durations of split backwards; whole ones take the sum."""
    stages, microbatches = len(parts.forward), len(parts.forward[0])
    if not schedule.split_backward:
        parts = whole_backwards(parts)

    def new_policy(stage: int) -> Policy:
        return schedule.policy(stage=stage, g_inter=stages, microbatches=microbatches)

    return simulate(
        new_policy,
        parts,
        [MessageCost(times.message)] * (stages - 1),
        (expected or parts) if schedule.uses_forecasts else None,
    )


def whole_backwards(parts: Durations) -> Durations:
    """The same work without splitting."""
    whole = [
        [first + second for first, second in zip(*rows, strict=True)]
        for rows in zip(parts.backward, parts.weight, strict=True)
    ]
    return Durations(parts.forward, whole)


# -- published ------------------------------------------------------------------------------


def published() -> list[dict[str, Any]]:
    """A row for each model and number of microbatches: bubble rates, published and ours."""
    rows = []
    for line in PUBLISHED.splitlines():
        model, stages_text, microbatches_text, *numbers = line.split()
        stages, microbatches = int(stages_text), int(microbatches_text)
        values = [float(number) for number in numbers]
        times, (heads, width), rates = Times(*values[:4]), values[4:6], values[6:]
        size = 32 / (34 + 5 * heads * 1024 / width)
        wide = split("message-driven", stages - 1, held=2 * stages)
        tried = {
            "1F1B": [Schedule("1f1b", 0, "alternate")],
            "ZB-H1": [split("zb-h1")],
            "1p": [split(patience=each) for each in PATIENCES],
            "2p": [replace(wide, patience=each) for each in PATIENCES],
            "2p in bytes": [
                replace(wide, patience=p, deferred_sizes=(size,) * stages) for p in PATIENCES
            ],
            "3p": [
                split("message-driven", stages + 2, held=3 * stages, patience=each)
                for each in PATIENCES
            ],
        }
        found = {
            name: [bubble_rate(each, stages, microbatches, times) for each in schedules]
            for name, schedules in tried.items()
        }
        names = ("1F1B", "ZB-1p", "ZB-H2", "ZB-2p")
        rows.append(
            {
                "model": model,
                "stages": stages,
                "microbatches": microbatches,
                "published": dict(zip(names, rates, strict=True)),
                "simulated": {k: [round(v, 4) for v in found[k]] for k in found},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def bubble_rate(schedule: Schedule, stages: int, microbatches: int, times: Times) -> float:
    """The part of the time in which the longest stage does nothing."""
    parts = Durations.uniform(stages, microbatches, *times[:3])
    done = run(schedule, parts, times)
    cost = max(stage.ends[-1] - stage.begins[0] for stage in done.stages)
    return 1 - microbatches * sum(times[:3]) / cost


# -- jitter ---------------------------------------------------------------------------------


def contenders(slack: int, expected: Times) -> dict[str, Schedule]:
    """The schedules that are compared; with split backwards all hold g_inter + slack."""
    return {
        "1f1b": Schedule("1f1b", slack, "alternate"),
        "message-driven, whole": Schedule("message-driven", slack, "alternate"),
        "zb-h1": split("zb-h1", slack),
        STATIC: split("zb-1p", slack, times=expected),
        "greedy": split("message-driven", slack, patience=0.0),
        OURS: split("message-driven", slack),
        "patience ¾": split("message-driven", slack, patience=0.75),
    }


def usual_times(law: str) -> Times:
    """What actions take on average."""
    forward, backward, weight = (MEANS[law] * each for each in TIMES[:3])
    return Times(forward, backward, weight, TIMES.message)


def drawn(law: str, size: tuple[int, int], key: int) -> Durations:
    """The durations of one step, the same for every schedule."""
    stages, microbatches = size
    chance = random.Random(f"{law} {size} {key}")  # noqa: S311 - delays, not secrets
    factor = LAWS[law]

    def rows(seconds: float) -> list[list[float]]:
        return [[seconds * factor(chance) for _ in range(microbatches)] for _ in range(stages)]

    return Durations(*(rows(seconds) for seconds in TIMES[:3]))


def jitter() -> list[dict[str, Any]]:
    """A row for each size, slack and law: the step time of every schedule over ours."""
    found = []
    for size, draws in SIZES.items():
        for slack in SLACKS:
            for law in JITTER_LAWS:
                scaled = usual_times(law)
                expected = Durations.uniform(*size, *scaled[:3])
                tried = contenders(slack, scaled)
                seconds: dict[str, list[float]] = {name: [] for name in tried}
                for key in range(1 if law == "none" else draws):
                    parts = drawn(law, size, key)
                    for name, schedule in tried.items():
                        seconds[name].append(run(schedule, parts, TIMES, expected).seconds)
                ours = sum(seconds[OURS])
                found.append(
                    {
                        "stages": size[0],
                        "microbatches": size[1],
                        "slack": slack,
                        "law": law,
                        "units": round(fmean(seconds[OURS]), 3),
                        "over_ours": {k: round(sum(v) / ours, 3) for k, v in seconds.items()},
                    }
                )
                print(json.dumps(found[-1]), flush=True)
    return found


# -- chunks ---------------------------------------------------------------------------------


def chunks() -> list[dict[str, Any]]:
    """A row for each size, pieces a stage and law: interleaved orders over ours in their memory."""
    found = []
    for size, draws in SIZES.items():
        stages = size[0]
        for pieces in (2, 4):
            for law in JITTER_LAWS[:2]:
                scaled = usual_times(law)
                expected = Durations.uniform(*size, *scaled[:3])
                seconds: dict[str, list[float]] = {}
                held = 0.0
                for key in range(1 if law == "none" else draws // 2):
                    chance = random.Random(f"{law} {size} {key}")  # noqa: S311
                    for is_split in (False, True):
                        one = chunked_seconds(
                            size, pieces, TIMES, partial_factor(law, chance), is_split=is_split
                        )
                        name = "interleaved, split" if is_split else "interleaved"
                        seconds.setdefault(name, []).append(one.seconds)
                        held = max(held, one.held)
                    parts = drawn(law, size, key)
                    memory = {"ours, 1p": 0, "ours, 2p": stages - 1, OURS: round(held) - stages}
                    for name, more in memory.items():
                        done = run(split("message-driven", more), parts, TIMES, expected)
                        seconds.setdefault(name, []).append(done.seconds)
                ours = sum(seconds[OURS])
                found.append(
                    {
                        "stages": stages,
                        "microbatches": size[1],
                        "pieces": pieces,
                        "law": law,
                        "held": round(held, 2),
                        "over_ours": {k: round(sum(v) / ours, 3) for k, v in seconds.items()},
                    }
                )
                print(json.dumps(found[-1]), flush=True)
    return found


def partial_factor(law: str, chance: random.Random) -> Callable[[], float]:
    """A law's factor as a function of nothing."""
    return lambda: LAWS[law](chance)


# -- emulated -----------------------------------------------------------------------------


def emulated(repeats: int) -> list[dict[str, Any]] | None:
    """Step times over ours, on the ranks of this job; the result on rank 0, None elsewhere."""
    from emulated import EmulatedRank
    from mpi4py import MPI

    from axsparse.runtime.grid import Grid
    from axsparse.runtime.mpi.mpi_transport import MpiTransport

    transport = MpiTransport(MPI.COMM_WORLD)
    size = transport.size, 4 * transport.size
    place = Grid(size[0], 1).place(transport.rank)
    link = transport.link(place)
    rows = []
    for slack in SLACKS:
        for law in JITTER_LAWS:
            tried = contenders(slack, usual_times(law))
            names = EMULATED
            ranks = {
                name: EmulatedRank(
                    transport,
                    place,
                    link,
                    tried[name].policy,
                    UNIT_SECONDS,
                    uses_forecasts=tried[name].uses_forecasts,
                )
                for name in names
            }
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for key in range(repeats + 1):  # the first warms up
                parts = drawn(law, size, key)
                order = list(names)
                random.Random(f"{key} {law} {slack}").shuffle(order)  # noqa: S311
                for name in order:
                    schedule = tried[name]
                    durations = parts if schedule.split_backward else whole_backwards(parts)
                    step = ranks[name].step(durations).step
                    if key:
                        seconds[name].append(step)
            ours = seconds[OURS]
            ratios = {
                name: median(other / own for other, own in zip(found, ours, strict=True))
                for name, found in seconds.items()
            }
            rows.append(
                {
                    "stages": size[0],
                    "microbatches": size[1],
                    "slack": slack,
                    "law": law,
                    "ours_ms": round(1e3 * median(ours), 1),
                    "over_ours": {name: round(ratio, 3) for name, ratio in ratios.items()},
                }
            )
            if place.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    transport.close()
    return rows if place.rank == 0 else None


# -- Markdown -------------------------------------------------------------------------------


def table(head: str, rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; `head` has its columns between bars."""
    names = head.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def markdown(results: Mapping[str, Any]) -> str:
    """The results as tables."""
    names = list(results["jitter"][0]["over_ours"])
    rates = [
        [
            f"{row['model']} m{row['microbatches']}",
            *(f"{row['published'][name]:.4f}" for name in ("1F1B", "ZB-1p", "ZB-H2", "ZB-2p")),
            *(f"{row['simulated'][name][0]:.4f}" for name in ("1F1B", "ZB-H1")),
            f"{row['simulated']['1p'][2]:.4f}",
            *(f"{min(row['simulated'][name]):.4f}" for name in ("1p", "2p", "2p in bytes", "3p")),
        ]
        for row in results["published"]
    ]
    steps = [
        [f"{row['stages']} × {row['microbatches']}", row["slack"], row["law"]]
        + [f"{row['over_ours'][name]:.3f}" for name in names if name != OURS]
        for row in results["jitter"]
    ]
    pieces = [
        [f"{row['stages']} × {row['microbatches']}", row["pieces"], row["law"], row["held"]]
        + [f"{row['over_ours'][n]:.3f}" for n in CHUNKED]
        for row in results["chunks"]
    ]
    real = [
        [row["slack"], row["law"], row["ours_ms"]]
        + [f"{row['over_ours'][n]:.3f}" for n in EMULATED if n != OURS]
        for row in results.get("emulated", [])
    ]
    return (
        "# Split backwards, simulated\n\nWritten by `benchmarks/zero_bubble.py`.\n\n"
        "## Bubble rates on published times\n\n"
        "Qi et al., 2024: table 5, and the same times (table 6) in our simulator. 1p, 2p and 3p "
        "are our rule with that memory; the first with a patience of ½, the others with the best "
        "of 0, ¼, ½ and ¾. In bytes: a deferred microbatch counts what it takes, 32 / (34 + "
        "5 a s / h) of one in flight.\n\n"
        + table(
            "|1F1B|ZB-1p|ZB-H2|ZB-2p|1F1B here|ZB-H1 here|1p, ½|1p|2p|2p in bytes|3p",
            rates,
        )
        + "\n## Step times under jitter\n\nOver ours (message-driven with weight gradients, "
        "patience ½). F 1, B 1, W 0.8, message 0.05; each action times a random factor.\n\n"
        + table(
            "|".join(["stages × microbatches", "slack", "law", *(n for n in names if n != OURS)]),
            steps,
        )
        + "\n## Pieces of the model on each stage\n\nStep times over ours with as much memory as "
        "the interleaved order takes (held, in microbatches of a whole stage).\n\n"
        + table(
            "stages × microbatches|pieces|law|held|interleaved|split, too|ours, 1p|ours, 2p",
            pieces,
        )
        + "\n## Emulated over MPI\n\nFour stages that sleep, 16 microbatches, the real engine and "
        "links; step times over ours (patience ½, announcements where durations are regular): "
        "medians of ratios under equal delays.\n\n"
        + table("slack|law|ours, ms|1f1b|message-driven, whole|zb-1p|greedy", real)
    )


def main() -> None:
    """Run all parts and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", choices=["published", "jitter", "chunks"])
    arguments = parser.parse_args()
    parts = {"published": published, "jitter": jitter, "chunks": chunks}
    saved = arguments.save
    results = json.loads(saved.read_text()) if saved is not None and saved.exists() else {}
    if started_by_launcher():
        found = emulated(arguments.repeats)
        if found is None:
            return
        results["emulated"], parts = found, {}
        results["machine of the emulated part"] = machine()
    for name, part in parts.items():
        if arguments.only in (None, name):
            results[name] = part()
    if saved is not None:
        saved.write_text(json.dumps(results, indent=1) + "\n")
        saved.with_suffix(".md").write_text(markdown(results))


if __name__ == "__main__":
    main()
