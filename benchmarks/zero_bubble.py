"""Bubble rates of split backwards, simulated with the package's policies, on published times.

    python benchmarks/zero_bubble.py

Repeats table 5 of the zero-bubble paper (Qi et al., 2024) from the times of its table 6: 1F1B and
ZB-H1, and the package's own rule with the memory of 1, 2 and 3 times 1F1B's. In bytes: a deferred
microbatch counts what it takes, 32 / (34 + 5 a s / h) of one in flight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from axsparse.pipeline.policy import Action, InOrder, Kind, Policy, action
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.simulator import Durations, MessageCost, simulate

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

NewPolicy = Callable[[int, int, int], Policy]
"""Makes the policy of (stage, stages, microbatches)."""


class Times(NamedTuple):
    """How long actions and messages take, on every stage, in any unit."""

    forward: float
    backward: float
    """Of the gradients of inputs alone."""
    weight: float
    message: float


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


def zb_h1_policy(stage: int, stages: int, microbatches: int) -> Policy:
    """ZB-H1 as a fixed order."""
    return InOrder(zb_h1(stage, stages, microbatches), stage=stage, g_inter=stages)


def of_schedule(schedule: Schedule) -> NewPolicy:
    """The policies of a schedule of the package."""
    return lambda stage, stages, microbatches: schedule.policy(
        stage=stage, g_inter=stages, microbatches=microbatches
    )


def ours(slack: int = 0) -> NewPolicy:
    """The package's rule for split backwards."""
    return of_schedule(Schedule("message-driven", slack, "alternate", split_backward=True))


def bubble_rate(
    new: NewPolicy, size: tuple[int, int], times: Times, *, is_split: bool = True
) -> float:
    """The part of the time in which the longest of (stages, microbatches) does nothing."""
    stages, microbatches = size
    forward, backward, weight, message = times
    parts = (forward, backward, weight) if is_split else (forward, backward + weight)
    done = simulate(
        lambda stage: new(stage, stages, microbatches),
        Durations.uniform(stages, microbatches, *parts),
        [MessageCost(message)] * (stages - 1),
    )
    cost = max(stage.ends[-1] - stage.begins[0] for stage in done.stages)
    return 1 - microbatches * sum(times[:3]) / cost


def published(lines: str = PUBLISHED) -> list[dict[str, Any]]:
    """A row for each model and number of microbatches: bubble rates, published and ours."""
    rows = []
    for line in lines.splitlines():
        model, stages_text, microbatches_text, *numbers = line.split()
        stages, microbatches = int(stages_text), int(microbatches_text)
        values = [float(number) for number in numbers]
        times, rates = Times(*values[:4]), values[6:]
        tried = {
            "1F1B": of_schedule(Schedule("1f1b", 0, "alternate")),
            "ZB-H1": zb_h1_policy,
            "1p": ours(),
            "2p": ours(stages - 1),
            "3p": ours(stages + 2),
        }
        size = stages, microbatches
        simulated = {
            name: round(bubble_rate(new, size, times, is_split=name != "1F1B"), 4)
            for name, new in tried.items()
        }
        names = ("1F1B", "ZB-1p", "ZB-H2", "ZB-2p")
        rows.append(
            {
                "model": model,
                "stages": stages,
                "microbatches": microbatches,
                "published": dict(zip(names, rates, strict=True)),
                "simulated": simulated,
            }
        )
    return rows


if __name__ == "__main__":
    for row in published():
        print(json.dumps(row))
