"""How long steps take whose backwards are split, by order: published times, jitter, chunks.

    python benchmarks/zero_bubble.py --save benchmarks/results/zero_bubble.json     (5 minutes)
    chrt --rr 5 mpirun -n 4 python -m mpi4py benchmarks/zero_bubble.py --save …      (5 minutes)

The second command emulates stages that sleep, over the real engine and MPI, and adds its part to
the file. All else is simulated, "ours" with the package's own policy. `published` repeats table 5
of the zero-bubble paper (Qi et al., 2024) from the times of its table 6. `jitter` draws a random
factor for each action and compares step times. `chunks` asks whether several pieces of the model on
each stage, as in Megatron-LM's interleaved order, still pay beside weight gradients. The Markdown
of the results is written beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from chunked_stages import Times, chunked_seconds
from emulated import machine
from schedules import LAWS

from axsparse.pipeline.policy import Action, InOrder, Kind, Policy, action
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.runtime.launcher import started_by_launcher

TIMES = Times(1.0, 1.0, 0.8, 0.05)
JITTER_LAWS = ("none", "exponential", "lognormal", "stalls")
SIZES = {(4, 16): 20, (8, 32): 20, (16, 64): 10}
"""Stages and microbatches, and how many sets of delays are drawn."""
SLACKS = (0, 1, 2)
UNIT_SECONDS = 0.02
"""Of the emulated stages: long against the half millisecond that an action costs a busy host."""
OURS, FIXED = "ours", "ours, fixed"
EMULATED = ("1f1b", "message-driven, whole", "zb-h1", FIXED, OURS)
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


class Contender(NamedTuple):
    """How the stages of a pipeline work."""

    policy: Callable[[int, int, int], Policy]
    """Makes the policy of (stage, stages, microbatches)."""
    is_split: bool = True


def zb_h1(stage: int, stages: int, microbatches: int, slack: int = 0) -> list[Action]:
    """ZB-H1: 1F1B whose stage s leaves the weight gradients of s microbatches for later.

    So no stage holds more than stages + slack microbatches, as the first one under 1F1B. (Qi et
    al., 2024, section 2.1 and figure 2.)
    """
    warm_up = min(microbatches, stages - stage + slack)
    actions = [action(Kind.FORWARD, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        actions.append(action(Kind.BACKWARD, microbatch))
        if microbatch >= stage:
            actions.append(action(Kind.WEIGHT, microbatch - stage))
        if microbatch + warm_up < microbatches:
            actions.append(action(Kind.FORWARD, microbatch + warm_up))
    first_left = max(0, microbatches - stage)
    actions += [action(Kind.WEIGHT, number) for number in range(first_left, microbatches)]
    return actions


def of_schedule(schedule: Schedule) -> Contender:
    """A schedule of the package."""
    return Contender(
        lambda stage, stages, microbatches: schedule.policy(
            stage=stage, g_inter=stages, microbatches=microbatches
        ),
        schedule.split_backward,
    )


def ours(slack: int = 0, **more: Any) -> Contender:
    """The package's rule for split backwards."""
    return of_schedule(Schedule("message-driven", slack, "alternate", split_backward=True, **more))


def of_lists(order: Callable[[int, int, int], Sequence[Action]]) -> Contender:
    """An order that is known beforehand."""
    return Contender(
        lambda stage, stages, microbatches: InOrder(
            order(stage, stages, microbatches), stage=stage, g_inter=stages
        )
    )


@cache
def fixed_orders(slack: int, stages: int, microbatches: int) -> list[list[Action]]:
    """What our rule does where every action takes as long as expected."""
    done = run(ours(slack), Durations.uniform(stages, microbatches, *TIMES[:3]), TIMES)
    return [stage.actions for stage in done.stages]


def run(contender: Contender, parts: Durations, times: Times) -> PipelineRun:
    """One step. `parts` are durations of split backwards; whole ones take the sum."""
    stages, microbatches = len(parts.forward), len(parts.forward[0])
    return simulate(
        lambda stage: contender.policy(stage, stages, microbatches),
        parts if contender.is_split else whole_backwards(parts),
        [MessageCost(times.message)] * (stages - 1),
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
        wide: dict[str, Any] = {"slack": stages - 1, "held": 2 * stages}
        tried = {
            "1F1B": of_schedule(Schedule("1f1b", 0, "alternate")),
            "ZB-H1": of_lists(zb_h1),
            "1p": ours(),
            "2p": ours(**wide),
            "2p in bytes": ours(**wide, deferred_sizes=(size,) * stages),
            "3p": ours(stages + 2, held=3 * stages),
        }
        found = {
            name: round(bubble_rate(each, stages, microbatches, times), 4)
            for name, each in tried.items()
        }
        names = ("1F1B", "ZB-1p", "ZB-H2", "ZB-2p")
        rows.append(
            {
                "model": model,
                "stages": stages,
                "microbatches": microbatches,
                "published": dict(zip(names, rates, strict=True)),
                "simulated": found,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def bubble_rate(contender: Contender, stages: int, microbatches: int, times: Times) -> float:
    """The part of the time in which the longest stage does nothing."""
    parts = Durations.uniform(stages, microbatches, *times[:3])
    done = run(contender, parts, times)
    cost = max(stage.ends[-1] - stage.begins[0] for stage in done.stages)
    return 1 - microbatches * sum(times[:3]) / cost


# -- jitter ---------------------------------------------------------------------------------


def contenders(slack: int) -> dict[str, Contender]:
    """What is compared; with split backwards all hold stages + slack microbatches."""
    return {
        "1f1b": of_schedule(Schedule("1f1b", slack, "alternate")),
        "message-driven, whole": of_schedule(Schedule("message-driven", slack, "alternate")),
        "zb-h1": of_lists(partial(zb_h1, slack=slack)),
        FIXED: of_lists(lambda stage, *size: fixed_orders(slack, *size)[stage]),
        OURS: ours(slack),
    }


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
                tried = contenders(slack)
                seconds: dict[str, list[float]] = {name: [] for name in tried}
                for key in range(1 if law == "none" else draws):
                    parts = drawn(law, size, key)
                    for name, contender in tried.items():
                        seconds[name].append(run(contender, parts, TIMES).seconds)
                total = sum(seconds[OURS])
                found.append(
                    {
                        "stages": size[0],
                        "microbatches": size[1],
                        "slack": slack,
                        "law": law,
                        "units": round(fmean(seconds[OURS]), 3),
                        "over_ours": {k: round(sum(v) / total, 3) for k, v in seconds.items()},
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
                        done = run(ours(more), parts, TIMES)
                        seconds.setdefault(name, []).append(done.seconds)
                total = sum(seconds[OURS])
                found.append(
                    {
                        "stages": stages,
                        "microbatches": size[1],
                        "pieces": pieces,
                        "law": law,
                        "held": round(held, 2),
                        "over_ours": {k: round(sum(v) / total, 3) for k, v in seconds.items()},
                    }
                )
                print(json.dumps(found[-1]), flush=True)
    return found


def partial_factor(law: str, chance: random.Random) -> Callable[[], float]:
    """A law's factor as a function of nothing."""
    return lambda: LAWS[law](chance)


# -- emulated -----------------------------------------------------------------------------


def as_schedule(contender: Contender) -> Callable[..., Policy]:
    """As an engine asks for policies."""

    def policy(*, stage: int, g_inter: int, microbatches: int) -> Policy:
        return contender.policy(stage, g_inter, microbatches)

    return policy


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
            tried = contenders(slack)
            names = EMULATED
            ranks = {
                name: EmulatedRank(
                    transport,
                    place,
                    link,
                    as_schedule(tried[name]),
                    UNIT_SECONDS,
                )
                for name in names
            }
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for key in range(repeats + 1):  # the first warms up
                parts = drawn(law, size, key)
                order = list(names)
                random.Random(f"{key} {law} {slack}").shuffle(order)  # noqa: S311
                for name in order:
                    durations = parts if tried[name].is_split else whole_backwards(parts)
                    step = ranks[name].step(durations).step
                    if key:
                        seconds[name].append(step)
            base = seconds[OURS]
            ratios = {
                name: median(other / own for other, own in zip(found, base, strict=True))
                for name, found in seconds.items()
            }
            rows.append(
                {
                    "stages": size[0],
                    "microbatches": size[1],
                    "slack": slack,
                    "law": law,
                    "ours_ms": round(1e3 * median(base), 1),
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
            *(f"{rate:.4f}" for rate in row["simulated"].values()),
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
        "are our rule with that memory. In bytes: a deferred microbatch counts what it takes, "
        "32 / (34 + 5 a s / h) of one in flight.\n\n"
        + table(
            "|1F1B|ZB-1p|ZB-H2|ZB-2p|1F1B here|ZB-H1 here|1p|2p|2p in bytes|3p",
            rates,
        )
        + "\n## Step times under jitter\n\nOver ours (message-driven with weight gradients). F 1, "
        "B 1, W 0.8, message 0.05; each action times a random factor.\n\n"
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
        "links; step times over ours: medians of ratios under equal delays.\n\n"
        + table("|".join(["slack", "law", "ours, ms", *(n for n in EMULATED if n != OURS)]), real)
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
