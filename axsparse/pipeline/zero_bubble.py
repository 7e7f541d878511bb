"""Static orders with weight gradients, for comparison: written by a rule, without a solver.

ZB-H1 is a pattern. The others are what the message-driven rule does where every action takes as
long as expected, with the patience for which that is shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from axsparse.pipeline.actions import Action, Kind, action
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.pipeline.split_policy import Bounds, MessageDrivenSplit

PATIENCES = (0.0, 0.25, 0.5, 0.75)
"""The patience that is tried: much where memory is short, little where it is not."""
Orders = tuple[tuple[Action, ...], ...]
"""The actions of each stage."""


class Times(NamedTuple):
    """How long actions and messages take, on every stage, in any unit."""

    forward: float
    backward: float
    """Of the gradients of inputs alone."""
    weight: float
    message: float


EQUAL_TIMES = Times(1.0, 1.0, 1.0, 0.0)


def zb_h1(stage: int, g_inter: int, microbatches: int, slack: int) -> list[Action]:
    """ZB-H1: 1F1B whose stage s leaves the weight gradients of s microbatches for later.

    So no stage holds more than g_inter + slack microbatches, as the first one under 1F1B. (Qi et
    al., 2024, section 2.1 and figure 2.)
    """
    warm_up = min(microbatches, g_inter - stage + slack)
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


@cache
def planned_orders(microbatches: int, bounds: tuple[Bounds, ...], times: Times) -> Orders:
    """The orders of all stages within their bounds, for actions that take `times`."""
    runs = [regular_run(microbatches, bounds, times, patience=patience) for patience in PATIENCES]
    best = min(runs, key=lambda run: run.seconds)
    return tuple(tuple(stage.actions) for stage in best.stages)


def regular_run(
    microbatches: int, bounds: Sequence[Bounds], times: Times, *, patience: float
) -> PipelineRun:
    """The message-driven rule where every action takes as long as expected."""
    g_inter = len(bounds)
    durations = Durations.uniform(g_inter, microbatches, *times[:3])
    return simulate(
        lambda stage: MessageDrivenSplit(
            stage=stage,
            g_inter=g_inter,
            microbatches=microbatches,
            bounds=bounds[stage],
            patience=patience,
        ),
        durations,
        [MessageCost(times.message)] * (g_inter - 1),
        durations,
    )
