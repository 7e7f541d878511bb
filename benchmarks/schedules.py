"""Message-driven against 1F1B and GPipe under random delays: emulated compute, and simulated.

    mpirun -n 4 python benchmarks/schedules.py [--save benchmarks/results/schedules.json]
    python benchmarks/schedules.py             [--save benchmarks/results/schedules.json]
    python benchmarks/schedules.py --plot benchmarks/results/schedules.svg

On four ranks: the real engine, policies and MPI links; a stage sleeps its time instead of
computing, so that four ranks fit two cores. All schedules run each set of delays in turn,
in an order drawn anew, and what is compared is the ratio within a set. On one process: the
simulator, without message costs, on more pipelines, laws and rules. Both parts go into one
file; the plot is drawn from it.

A forward takes 1, a backward 2 units, times a factor per stage, microbatch and direction:

- none: 1
- exponential: ½ + ½ X, X exponential with mean 1
- lognormal: exp(N / 2), N normal
- stalls: 5 with a chance of 5 %, else 1
- uniform: between ½ and 3/2; full exponential: X; wide lognormal: exp(N) (simulated only)

"1f1b" warms up with g_inter − stage − 1 + slack forwards, except on the last stage, which
has nothing to wait for; "1f1b, last too" does so there as well. Both hold as many
activations as message-driven may. GPipe holds all microbatches whatever the slack.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from emulated import emulate, machine

from axsparse.pipeline.policy import (
    Action,
    Bounds,
    InOrder,
    MessageDriven,
    Policy,
    action,
)
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.simulator import Durations, simulate
from axsparse.runtime.communication import Direction
from axsparse.runtime.launcher import started_by_launcher

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
BACKWARD_UNITS = 2.0
UNIT_SECONDS = 0.008
"""Long against the back-off's 0.2 ms, short enough for many repeats."""
SLACKS = (0, 1, 2, 4)
REAL_SIZE = (4, 16)
REAL_LAWS = ("none", "exponential", "lognormal", "stalls")
LAWS: Mapping[str, Callable[[random.Random], float]] = {
    "none": lambda _: 1.0,
    "uniform": lambda chance: chance.uniform(0.5, 1.5),
    "exponential": lambda chance: 0.5 + 0.5 * chance.expovariate(1.0),
    "lognormal": lambda chance: chance.lognormvariate(0.0, 0.5),
    "stalls": lambda chance: 5.0 if chance.random() < 0.05 else 1.0,
    "full exponential": lambda chance: chance.expovariate(1.0),
    "wide lognormal": lambda chance: chance.lognormvariate(0.0, 1.0),
}
SIMULATED_SIZES = {(4, 16): 100, (8, 32): 40, (16, 64): 10}
"""Stages and microbatches, and how many sets of delays are drawn."""
UNEVEN_SIZE = (8, 32)
"""Simulated with a last stage that takes 1.3 times as long, too."""
OURS = "alternate"


# -- schedules and rules --------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A rule that was tried: 1F1B's order as a floor, message-driven above it.

    Like alternating, but a backward that would leave fewer than g_inter − stage − 1 − `below`
    in flight waits for the next forward, while there are any: two backwards in a row
    starve the stages downstream.
    """

    below: int

    def policy(self, *, stage: int, g_inter: int, microbatches: int, slack: int) -> Policy:
        floor = max(0, g_inter - stage - 1 - self.below)
        return _Held(stage, g_inter, microbatches, slack, floor)


class _Held:
    def __init__(self, stage: int, g_inter: int, microbatches: int, slack: int, floor: int) -> None:
        self._ends = (stage == 0, stage == g_inter - 1)
        self._all = microbatches
        self._here = [microbatches if stage == 0 else 0, 0]
        self._begun = [0, 0]
        self._bound = g_inter - stage + slack
        self._floor = floor
        self._last: Direction | None = None

    @property
    def finished(self) -> bool:
        return self._begun[BACKWARD] == self._all

    def expects(self, direction: Direction) -> bool:
        return not self._ends[direction] and self._here[direction] < self._all

    def arrived(self, direction: Direction, microbatch: int) -> None:
        assert microbatch == self._here[direction]
        self._here[direction] += 1

    def next(self) -> Action | None:
        held = self._begun[FORWARD] - self._begun[BACKWARD]
        forward = self._begun[FORWARD] < self._here[FORWARD] and held < self._bound
        backward = self._begun[BACKWARD] < self._here[BACKWARD]
        if held <= self._floor and self._begun[FORWARD] < self._all:
            backward = False
        if forward and backward:
            alternate = self._last is BACKWARD and not self._ends[1]
            direction = FORWARD if alternate else BACKWARD
        elif forward or backward:
            direction = FORWARD if forward else BACKWARD
        else:
            return None
        self._last = direction
        self._begun[direction] += 1
        if self._ends[1] and direction is FORWARD:
            self._here[BACKWARD] += 1
        return action(direction, self._begun[direction] - 1)


def wide_bound(*, stage: int, g_inter: int, microbatches: int, slack: int) -> Policy:
    """Alternating, every stage with the bound of the first one: more memory on the others."""
    bounds = Bounds(g_inter + slack, g_inter + slack)
    return MessageDriven(stage=stage, g_inter=g_inter, microbatches=microbatches, bounds=bounds)


def last_too(*, stage: int, g_inter: int, microbatches: int, slack: int) -> Policy:
    """1F1B whose last stage warms up as well."""
    warm_up = min(microbatches, g_inter - stage - 1 + slack)
    actions = [action(FORWARD, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            actions.append(action(FORWARD, microbatch + warm_up))
        actions.append(action(BACKWARD, microbatch))
    return InOrder(actions, stage=stage, g_inter=g_inter)


def named(schedule: Any, prefer: Any = "alternate") -> Callable[..., Policy]:
    """The policies of a schedule of the package, as a function of the slack as well."""
    return lambda slack, **place: Schedule(schedule, slack, prefer).policy(**place)


REAL: Mapping[str, Callable[..., Policy]] = {
    OURS: named("message-driven"),
    "backward": named("message-driven", "backward"),
    "1f1b": named("1f1b"),
    "1f1b, last too": last_too,
    "gpipe": named("gpipe"),
}
SIMULATED: Mapping[str, Callable[..., Policy]] = {
    **REAL,
    "forward": named("message-driven", "forward"),
    "held at the floor": Held(0).policy,
    "held one below": Held(1).policy,
    "wide bound": wide_bound,
}


def draw(law: str, size: tuple[int, int], key: object, last_stage: float = 1.0) -> Durations:
    """Delays of one step, in units; the same for every schedule."""
    g_inter, microbatches = size
    chance = random.Random(f"{law} {size} {key}")  # noqa: S311 - delays, not secrets
    factor = LAWS[law]
    weights = [1.0] * (g_inter - 1) + [last_stage]

    def rows(units: float) -> list[list[float]]:
        return [
            [units * weight * factor(chance) for _ in range(microbatches)] for weight in weights
        ]

    return Durations(rows(1.0), rows(BACKWARD_UNITS))


def simulated_units(
    policy: Callable[..., Policy], slack: int, size: tuple[int, int], durations: Durations
) -> float:
    """Units of a simulated step without message costs."""
    g_inter, microbatches = size
    return simulate(
        lambda stage: policy(stage=stage, g_inter=g_inter, microbatches=microbatches, slack=slack),
        durations,
    ).seconds


def over_ours(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Each schedule's time over ours: of the sums, then median and quartiles of the ratios in
    equal delays."""
    table = {}
    ours = times[OURS]
    for name, seconds in times.items():
        if name == OURS:
            continue
        pairs = [other / own for other, own in zip(seconds, ours, strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
        values = (sum(seconds) / sum(ours), middle, low, high)
        table[name] = [round(value, 4) for value in values]
    return table


# -- simulated ------------------------------------------------------------------------------


def simulated() -> dict[str, Any]:
    """Every rule on every pipeline and law; one row a size, law and slack."""
    found: dict[str, Any] = {}
    cases = [(size, 1.0, law) for size in SIMULATED_SIZES for law in LAWS]
    cases += [(UNEVEN_SIZE, 1.3, law) for law in REAL_LAWS]
    for size, last_stage, law in cases:
        for slack in SLACKS:
            times: dict[str, list[float]] = {name: [] for name in SIMULATED}
            for key in range(1 if law == "none" else SIMULATED_SIZES[size]):
                durations = draw(law, size, key, last_stage)
                for name, policy in SIMULATED.items():
                    times[name].append(simulated_units(policy, slack, size, durations))
            uneven = "" if last_stage == 1.0 else f", last stage × {last_stage}"
            row = f"{size[0]}x{size[1]}{uneven}, {law}, slack {slack}"
            found[row] = over_ours(times)
            print(row, {name: value[0] for name, value in found[row].items()}, flush=True)
    return found


# -- real -----------------------------------------------------------------------------------


def real(repeats: int) -> dict[str, Any] | None:
    """On the ranks of this job; the result on rank 0, None elsewhere."""
    from mpi4py import MPI

    from axsparse.runtime.grid import Grid
    from axsparse.runtime.mpi.mpi_transport import MpiTransport

    size = REAL_SIZE
    g_inter, _ = size
    transport = MpiTransport(MPI.COMM_WORLD)
    if transport.size != g_inter:
        raise SystemExit(f"benchmarks/schedules.py: {transport.size} ranks; start {g_inter}")
    place = Grid(g_inter, 1).place(transport.rank)
    link = transport.link(place)
    begun = os.getloadavg()
    cells: dict[tuple[str, int], dict[str, list[float]]] = {
        (law, slack): {name: [] for name in REAL} for law in REAL_LAWS for slack in SLACKS
    }
    expected: dict[tuple[str, int], dict[str, list[float]]] = {
        cell: {name: [] for name in REAL} for cell in cells
    }
    for repeat in range(repeats + 1):  # the first warms up
        for (law, slack), times in cells.items():
            durations = draw(law, size, repeat)
            order = list(REAL)
            random.Random(f"{repeat} {law} {slack}").shuffle(order)  # noqa: S311
            for name in order:
                policy = partial(REAL[name], slack=slack)
                step = emulate(transport, place, link, policy, durations, UNIT_SECONDS).step
                if repeat:
                    times[name].append(step)
                    units = simulated_units(REAL[name], slack, size, durations)
                    expected[law, slack][name].append(units * UNIT_SECONDS)
        if place.rank == 0:
            print(f"repeat {repeat} of {repeats}, load {os.getloadavg()}", flush=True)
    transport.close()
    if place.rank != 0:
        return None
    rows = {}
    for (law, slack), times in cells.items():
        ours = times[OURS]
        drift = {
            name: statistics.fmean(seconds) / statistics.fmean(expected[law, slack][name]) - 1
            for name, seconds in times.items()
        }
        table = over_ours(times)
        rows[f"{law}, slack {slack}"] = {
            "ours_ms": [round(1e3 * value, 2) for value in statistics.quantiles(ours, n=4)],
            "over_ours": table,
            "real_over_simulated": {name: round(1 + value, 4) for name, value in drift.items()},
        }
        print(law, slack, {name: value[0] for name, value in table.items()})
    return {
        "repeats": repeats,
        "unit_seconds": UNIT_SECONDS,
        "load": [begun, os.getloadavg()],
        "rows": rows,
    }


# -- plot -----------------------------------------------------------------------------------


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Time of 1F1B and of backward-first over ours, by slack."""
    import matplotlib as mpl

    mpl.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    laws = [law for law in REAL_LAWS if law != "none"]
    others = ("1f1b, last too", "1f1b", "gpipe", "backward")
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    panels: list[tuple[str, Callable[[str, int, str], float]]] = [
        (
            "4 × 16, emulated over MPI",
            lambda law, slack, name: results["real"]["rows"][f"{law}, slack {slack}"]["over_ours"][
                name
            ][0],
        ),
        *(
            (
                f"{p} × {m}, simulated",
                lambda law, slack, name, p=p, m=m: results["simulated"][
                    f"{p}x{m}, {law}, slack {slack}"
                ][name][0],
            )
            for p, m in ((4, 16), (8, 32))
        ),
    ]
    for axis, (title, value) in zip(axes, panels, strict=True):
        for color, name in enumerate(others):
            for style, law in zip(("-", "--", ":"), laws, strict=True):
                axis.plot(
                    range(len(SLACKS)),
                    [value(law, slack, name) for slack in SLACKS],
                    style,
                    color=f"C{color}",
                    label=f"{name}, {law}",
                    marker=".",
                )
        axis.axhline(1.0, color="black", linewidth=0.7)
        axis.set_xticks(range(len(SLACKS)), [str(slack) for slack in SLACKS])
        axis.set_xlabel("slack")
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("step time over message-driven's")
    axes[-1].legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run the part that fits this process, and merge it into the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.plot:
        source = arguments.plot.with_suffix(".json")
        plot(json.loads(source.read_text()), arguments.plot)
        return
    launched = started_by_launcher()
    part = real(arguments.repeats) if launched else simulated()
    if part is None or arguments.save is None:
        return
    results = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
    results[f"machine of the {'real' if launched else 'simulated'} part"] = machine()
    results["real" if launched else "simulated"] = part
    text = json.dumps(results, indent=1)
    arguments.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
